"""The detokenizer as the scheduler and the front see it."""

from __future__ import annotations

import array
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.ipc.messages import (
    FinishReason,
    StreamEnd,
    StreamStart,
    TextDelta,
    TextDeltas,
    TokenDeltas,
)
from runtime.requests.extra_spec import ExtraBlock
from runtime.text.decoders import REPLACEMENT, PieceDecoder
from runtime.text.detokenizer import MAX_UNDECODED, Detokenizer, MalformedDeltas, Stream, portions
from runtime.text.tokenizer import Tokenizer
from tests.support.text_strategies import SNIPPETS, splits, texts
from tests.support.tiny_tokenizers import KINDS

PROPERTY = settings(max_examples=80, deadline=None, derandomize=True, database=None)
LENGTH = FinishReason("length", length=99)


@pytest.fixture(scope="module")
def tokenizers():
    return {kind: Tokenizer(make(), {"eos_token": "</s>"}) for kind, make in KINDS.items()}


@pytest.fixture
def tokenizer(tokenizers):
    return tokenizers["llama3"]


def pack(ids):
    return array.array("i", ids).tobytes()


def unpack(data):
    return array.array("i", data).tolist()


def start(request_id=1, **changes):
    values = {
        "stream": True,
        "stop": [],
        "skip_special_tokens": True,
        "spaces_between_special_tokens": True,
        "no_stop_trim": False,
        "stream_interval": 1,
        "prompt_tail": b"",
    }
    return StreamStart(request_id=request_id, **{**values, **changes})


def message(starts=(), tokens=None, ends=None):
    tokens = tokens or {}
    return TokenDeltas(
        starts=list(starts),
        cached_tokens=[5] * len(starts),
        request_ids=list(tokens),
        token_counts=[len(ids) for ids in tokens.values()],
        token_ids=pack([i for ids in tokens.values() for i in ids]),
        ends=[StreamEnd(request_id, reason) for request_id, reason in (ends or {}).items()],
    )


class Run:
    """One request from start to end, checked for what must hold in any of them."""

    def __init__(self, tokenizer, steps, reason=LENGTH, **changes):
        self.deltas, self.hits = [], 0
        detokenizer = Detokenizer(tokenizer)
        begin = start(**changes)
        for index, step in enumerate(steps):
            ends = {1: reason} if index == len(steps) - 1 else {}
            out, hit = detokenizer.step(message([begin] if index == 0 else [], {1: step}, ends))
            self.deltas += out.deltas
            self.hits += 0 if hit is None else len(hit.request_ids)
        assert detokenizer.num_streams == 0
        assert [d.reason is not None for d in self.deltas] == [False] * (len(self.deltas) - 1) + [
            True
        ]
        assert [d.cached_tokens for d in self.deltas] == [5] + [-1] * (len(self.deltas) - 1)
        self.text = "".join(d.text for d in self.deltas)
        self.ids = [i for d in self.deltas for i in unpack(d.token_ids)]
        self.reason = self.deltas[-1].reason


def first_match(text, stops):
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return end - len(longest), end, longest
    return None


@pytest.mark.parametrize("kind", KINDS)
def test_streamed_equals_whole_equals_reference(tokenizers, kind):
    tokenizer = tokenizers[kind]

    @PROPERTY
    @given(
        texts,
        st.lists(st.sampled_from(SNIPPETS) | st.text(min_size=1, max_size=3), max_size=3),
        st.booleans(),
        st.booleans(),
        st.integers(1, 5),
        st.data(),
    )
    def check(text, stops, skip, keep, interval, data):
        ids = tokenizer.encode(text, add_special_tokens=False)
        options = {"stop": stops, "skip_special_tokens": skip, "no_stop_trim": keep}
        streamed = Run(tokenizer, splits(data, ids), stream_interval=interval, **options)
        whole = Run(tokenizer, splits(data, ids), stream=False, **options)
        assert len(whole.deltas) == 1
        assert (streamed.text, streamed.ids, streamed.reason) == (
            whole.text,
            whole.ids,
            whole.reason,
        )
        full = tokenizer.decode(ids, skip)
        match = first_match(full, stops)
        if match is None:
            assert (streamed.text, streamed.ids, streamed.reason) == (full, ids, LENGTH)
            assert streamed.hits == 0
            return
        begin, end, stop = match
        assert streamed.text == full[: end if keep else begin]
        assert streamed.reason == FinishReason("stop", matched=stop)
        # The token that completed the stop string is the last: one fewer, and it was not complete.
        assert streamed.ids == ids[: len(streamed.ids)]
        assert stop in tokenizer.decode(streamed.ids, skip)
        before = tokenizer.decode(streamed.ids[:-1], skip).rstrip(REPLACEMENT)
        assert not first_match(before, stops) or REPLACEMENT in stop

    check()


@pytest.mark.parametrize("stops", [[], ["isn't", "world"]], ids=["plain", "stops"])
def test_cleaned_text_is_whole_too(stops):
    tokenizer = Tokenizer(KINDS["wordpiece"](), {"clean_up_tokenization_spaces": True})

    @PROPERTY
    @given(texts, st.data())
    def check(text, data):
        ids = tokenizer.encode(text, add_special_tokens=False)
        full = tokenizer.decode(ids)
        match = first_match(full, stops)
        for streams in (True, False):
            run = Run(tokenizer, splits(data, ids), stream=streams, stop=stops)
            assert run.text == full[: match[0] if match else len(full)]

    check()


@pytest.mark.parametrize("kind", ["llama3", "llama2", "unigram"])
def test_many_streams_at_once_do_not_mix(tokenizers, kind):
    tokenizer = tokenizers[kind]

    @settings(PROPERTY, max_examples=40)
    @given(st.lists(texts, min_size=1, max_size=6), st.lists(st.integers(0, 3), max_size=9))
    def check(contents, step_sizes):
        counts = itertools.cycle([*step_sizes, 1])
        detokenizer = Detokenizer(tokenizer)
        left = {n: tokenizer.encode(t, add_special_tokens=False) for n, t in enumerate(contents)}
        expected = {n: tokenizer.decode(ids) for n, ids in left.items()}
        shown = dict.fromkeys(left, "")
        starts = [start(n, stream=bool(n % 2)) for n in left]
        while left:
            tokens, ends = {}, {}
            for n in list(left):
                count = next(counts)
                tokens[n], left[n] = left[n][:count], left[n][count:]
                if not left[n]:
                    ends[n] = LENGTH
                    del left[n]
            out, hit = detokenizer.step(message(starts, tokens, ends))
            starts = []
            assert hit is None
            for delta in out.deltas:
                shown[delta.request_id] += delta.text
        assert shown == expected

    check()


def test_the_first_token_at_once_then_by_interval(tokenizer):
    ids = tokenizer.encode("abcdefghij", add_special_tokens=False)
    run = Run(tokenizer, [[i] for i in ids], stream_interval=4)
    counts = [len(d.token_ids) // 4 for d in run.deltas]
    assert counts == [1, *[4] * ((len(ids) - 1) // 4), *filter(None, [(len(ids) - 1) % 4])]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("changes", [{"stream": False}, {"stream_interval": 500}])
def test_what_is_not_due_is_decoded_on_the_way(tokenizers, kind, changes, monkeypatch):
    """The end of a long answer is no more work than its middle."""
    tokenizer = tokenizers[kind]
    ids = tokenizer.encode("Ünïcode and 🦙 words, again and again. " * 30)[:300]
    decoded: list[int] = []
    decode = Stream._decode

    def count(stream):
        decoded.append(len(stream._undecoded))
        return decode(stream)

    monkeypatch.setattr(Stream, "_decode", count)
    run = Run(tokenizer, [[each] for each in ids], **changes)
    assert max(decoded) <= MAX_UNDECODED + 1
    assert sum(decoded) == len(ids)
    whole = Run(tokenizer, [ids], **changes)
    assert (run.text, run.ids) == (whole.text, whole.ids)
    assert run.text


def test_a_token_that_turns_out_to_be_the_stop_is_not_shown(tokenizer):
    """Its end may come a message later, also where the tokens before were decoded on the way."""
    ids = tokenizer.encode("a few words that are longer than what waits to be decoded at once")
    ids = (ids * 2)[: MAX_UNDECODED + 1]
    reason = FinishReason("stop", matched=ids[-1])
    found = Run(tokenizer, [*([each] for each in ids), []], reason=reason, stream=False)
    assert found.ids == ids
    assert found.text == Run(tokenizer, [ids[:-1]], stream=False).text


def test_a_stop_token_is_reported_and_not_shown(tokenizer):
    ids = tokenizer.encode("hi there", add_special_tokens=False)
    eos = tokenizer.eos_token_id
    for last in (eos, ids[-1]):
        reason = FinishReason("stop", matched=last)
        whole = [*ids, last]
        for skip in (True, False):
            for stops in ([], ["never"]):
                for streams in (True, False):
                    options = {"skip_special_tokens": skip, "stop": stops, "stream": streams}
                    run = Run(tokenizer, [[i] for i in whole], reason, **options)
                    assert (run.text, run.ids, run.reason) == ("hi there", whole, reason)
                    kept = Run(tokenizer, [whole], reason, no_stop_trim=True, **options)
                    assert (kept.text, kept.ids) == (tokenizer.decode(whole, skip), whole)


def test_a_stop_string_comes_before_every_other_reason(tokenizer):
    ids = tokenizer.encode("one STOP", add_special_tokens=False)
    eos = tokenizer.eos_token_id
    at_length = Run(tokenizer, [[i] for i in ids], LENGTH, stop=["STOP"])
    assert (at_length.text, at_length.reason.matched, at_length.hits) == ("one ", "STOP", 0)
    with_eos = Run(tokenizer, [[*ids, eos]], FinishReason("stop", matched=eos), stop=["STOP"])
    assert (with_eos.reason.matched, with_eos.ids) == ("STOP", ids)
    # Half of a stop string at the end is text like any other.
    half = Run(tokenizer, [[i] for i in ids[:-1]], LENGTH, stop=["STOP!"])
    assert half.text == tokenizer.decode(ids[:-1])
    aborted = Run(tokenizer, [[i] for i in ids], FinishReason("abort"), stop=["STOP!"])
    assert (aborted.text, aborted.reason) == ("one STOP", FinishReason("abort"))


def test_the_scheduler_hears_of_a_stop_once_and_may_be_late(tokenizer):
    detokenizer = Detokenizer(tokenizer)
    ids = tokenizer.encode("STOP", add_special_tokens=False)
    detokenizer.step(message([start(stop=["STOP"])]))
    hits = [detokenizer.step(message(tokens={1: [i]}))[1] for i in ids]
    assert [hit.request_ids for hit in hits if hit] == [[1]]
    for late in (message(tokens={1: ids}), message(tokens={1: []}, ends={1: LENGTH})):
        out, hit = detokenizer.step(late)
        assert out.deltas == []
        assert hit is None
    assert detokenizer.num_streams == 0


def test_nothing_generated_is_an_answer_too(tokenizer):
    reason = FinishReason("length", length=0)
    for tokens in ({}, {1: []}):
        for streams in (True, False):
            detokenizer = Detokenizer(tokenizer)
            out, _ = detokenizer.step(message([start(stream=streams)], tokens, {1: reason}))
            (delta,) = out.deltas
            assert (delta.text, delta.token_ids, delta.reason) == ("", b"", reason)


def test_unknown_requests_and_ids_are_ignored(tokenizer):
    detokenizer = Detokenizer(tokenizer)
    out, hit = detokenizer.step(message(tokens={9: [1, 2]}, ends={8: LENGTH}))
    assert (out.deltas, hit) == ([], None)
    run = Run(tokenizer, [[-1, 10**6, 2**31 - 1]])
    assert (run.text, run.ids) == ("", [-1, 10**6, 2**31 - 1])


def test_a_second_start_does_not_reset_a_stream(tokenizer):
    detokenizer = Detokenizer(tokenizer)
    *half, last = tokenizer.encode("🦆", add_special_tokens=False)
    detokenizer.step(message([start()], {1: half}))
    out, _ = detokenizer.step(message([start()], {1: [last]}))
    assert out.deltas[0].text == "🦆"


def test_reset_forgets_everything(tokenizer):
    detokenizer = Detokenizer(tokenizer)
    detokenizer.step(message([start()], {1: [3]}))
    detokenizer.reset()
    assert detokenizer.num_streams == 0
    assert detokenizer.step(message(tokens={1: [3]}))[0].deltas == []


def test_a_failure_ends_its_own_request_only(tokenizer, monkeypatch):
    detokenizer = Detokenizer(tokenizer)
    bad, good = tokenizer.encode("xy", add_special_tokens=False)
    push = PieceDecoder.push

    def failing(self, token_id):
        if token_id == bad:
            raise RuntimeError("broken")
        return push(self, token_id)

    monkeypatch.setattr(PieceDecoder, "push", failing)
    out, hit = detokenizer.step(message([start(1), start(2)], {1: [bad], 2: [good]}))
    failed, fine = out.deltas
    assert (failed.reason.type, failed.reason.status_code) == ("abort", 500)
    assert (fine.text, fine.reason) == ("y", None)
    assert hit.request_ids == [1]
    out, hit = detokenizer.step(message(tokens={1: [good], 2: [good]}, ends={2: LENGTH}))
    assert [(d.request_id, d.text) for d in out.deltas] == [(2, "y")]
    assert hit is None


def test_a_start_that_cannot_be_used_ends_its_own_request_only(tokenizer):
    detokenizer = Detokenizer(tokenizer)
    out, hit = detokenizer.step(message([start(1, prompt_tail=b"odd"), start(2)], {1: [3], 2: [3]}))
    assert [d.request_id for d in out.deltas if d.reason] == [1]
    assert hit.request_ids == [1]
    assert detokenizer.num_streams == 1


@pytest.mark.parametrize(
    "broken",
    [
        TokenDeltas([], [1], [], [], b"", []),
        TokenDeltas([], [], [1], [], b"", []),
        TokenDeltas([], [], [1], [2], pack([1]), []),
        TokenDeltas([], [], [1], [1], b"abc", []),
        TokenDeltas([], [], [1, 2], [2, -1], pack([1]), []),
    ],
)
def test_contradictions_are_refused_before_anything_changes(tokenizer, broken):
    detokenizer = Detokenizer(tokenizer)
    detokenizer.step(message([start()]))
    with pytest.raises(MalformedDeltas):
        detokenizer.step(broken)
    assert detokenizer.step(message(tokens={1: [3]}))[0].deltas


def test_extras_travel_with_their_tokens(tokenizer):
    detokenizer = Detokenizer(tokenizer)
    ids = tokenizer.encode("one two three", add_special_tokens=False)
    first = ExtraBlock(1, "one", True, b"prompt")
    blocks = [ExtraBlock(1, "one", False, str(at).encode()) for at in range(len(ids))]
    begin = message([start(stream_interval=2)])
    begin.extras.append(first)
    # A prompt's numbers wait for the first text.
    assert detokenizer.step(begin)[0].deltas == []
    seen = []
    for at, (token_id, block) in enumerate(zip(ids, blocks, strict=True)):
        ends = {1: LENGTH} if at == len(ids) - 1 else None
        sent = message(tokens={1: [token_id]}, ends=ends)
        sent.extras.append(block)
        # Nobody waits for this one.
        sent.extras.append(ExtraBlock(99, "one", False, b""))
        for delta in detokenizer.step(sent)[0].deltas:
            num_outputs = sum(not each.is_input for each in delta.extras)
            assert num_outputs == len(unpack(delta.token_ids))
            seen += delta.extras
    assert seen == [first, *blocks]
    assert not detokenizer.num_streams


def test_a_block_that_replaces_is_its_extra_s_only_one(tokenizer):
    detokenizer = Detokenizer(tokenizer)
    begin = message([start(stream=False)])
    kept = ExtraBlock(1, "one", False, b"kept")
    blocks = [ExtraBlock(1, "other", False, str(at).encode(), replaces=True) for at in range(3)]
    begin.extras.extend([blocks[0], kept, *blocks[1:]])
    detokenizer.step(begin)
    (delta,) = detokenizer.step(message(ends={1: LENGTH}))[0].deltas
    assert delta.extras == [kept, blocks[2]]


def test_a_pattern_that_ends_with_the_output_is_found_there(tokenizer):
    ids = tokenizer.encode("ab 12", add_special_tokens=False)
    run = Run(tokenizer, [[each] for each in ids], stop_regex=[r"\d+$"])
    assert run.reason == FinishReason("stop", matched=r"\d+$")
    assert run.text == tokenizer.decode(ids)[:-2]
    # A failure stays one.
    failed = FinishReason("abort", message="broken", status_code=500)
    run = Run(tokenizer, [[each] for each in ids], reason=failed, stop_regex=[r"\d+$"])
    assert run.reason == failed


def test_numbers_go_out_in_portions_where_nobody_streams(tokenizer):
    detokenizer = Detokenizer(tokenizer)
    ids = tokenizer.encode("one two three " * 40, add_special_tokens=False)
    detokenizer.step(message([start(stream=False)]))
    values = bytes(4 * 2000)
    sizes, tokens = [], []
    for at, token_id in enumerate(ids):
        ends = {1: LENGTH} if at == len(ids) - 1 else None
        sent = message(tokens={1: [token_id]}, ends=ends)
        sent.extras.append(ExtraBlock(1, "one", False, values))
        for delta in detokenizer.step(sent)[0].deltas:
            assert len(delta.extras) == len(unpack(delta.token_ids))
            sizes.append(sum(len(block.data) for block in delta.extras))
            tokens += unpack(delta.token_ids)
    assert tokens == list(ids)
    assert len(sizes) > 2
    assert max(sizes) < 300_000


def test_a_large_step_is_several_messages():
    block = ExtraBlock(1, "one", False, bytes(400_000))
    deltas = [TextDelta(at, "x", b"", extras=[block] if at % 2 else None) for at in range(20)]
    sent = list(portions(TextDeltas(deltas)))
    assert [each for message in sent for each in message.deltas] == deltas
    assert len(sent) == 4
    plain = TextDeltas(deltas[::2])
    assert list(portions(plain)) == [plain]
    assert list(portions(TextDeltas([]))) == []
