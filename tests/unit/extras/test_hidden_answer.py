"""Hidden states become lists and JSON that say the same, without keeping others waiting."""

from array import array

import orjson
import pytest

from runtime.client.generation_stream import GenerationChunk
from runtime.eventloop.json_pieces import all_pieces
from runtime.extras.hidden_states.answer import HiddenAnswer
from runtime.requests.extra_spec import ExtraBlock

SIZE = 3


def rows(*firsts):
    return array("f", [each + part / 4 for each in firsts for part in range(SIZE)]).tobytes()


def chunk(token_ids, inputs=(), outputs=()):
    made = GenerationChunk("", token_ids, None, 4, 0)
    blocks = [(True, data) for data in inputs] + [(False, data) for data in outputs]
    made.extras = [ExtraBlock(1, "hidden_states", is_input, data) for is_input, data in blocks]
    return made


def answer(mode, *chunks):
    made = HiddenAnswer(SIZE, only_last=mode == "last")
    for each in chunks:
        made.add(each)
    return made


CHUNKS = [
    chunk([], inputs=[rows(1, 2)]),
    chunk([7], inputs=[rows(3)], outputs=[rows(4)]),
    chunk([8, 9], outputs=[rows(5), rows(6)]),
]


def firsts(matrix):
    return [row[0] for row in matrix]


def test_the_prompt_s_rows_then_one_for_each_later_token():
    prompt, *later = answer("all", *CHUNKS).lists()
    assert firsts(prompt) == [1, 2, 3, 4]
    assert firsts(later) == [5, 6]
    assert prompt[0] == [1, 1.25, 1.5]


def test_rows_behind_a_stop_string_are_cut():
    cut = [*CHUNKS[:2], chunk([8], outputs=[rows(5), rows(6)])]
    _, *later = answer("all", *cut).lists()
    assert firsts(later) == [5]


def test_the_last_alone():
    assert answer("last", *CHUNKS).lists() == [6, 6.25, 6.5]
    assert answer("last").lists() == []


@pytest.mark.parametrize("mode", ["all", "last"])
@pytest.mark.parametrize("chunks", [[], CHUNKS[:1], CHUNKS])
def test_json_says_the_same(mode, chunks):
    made = answer(mode, *chunks)
    assert orjson.loads(b"".join(all_pieces({"a": made})))["a"] == made.lists()


def test_json_is_made_row_by_row():
    made = answer("all", chunk([1], inputs=[rows(*range(100))], outputs=[rows(0)]))
    assert made.cost == 101 * SIZE
    assert max(map(len, made.pieces())) < 40
