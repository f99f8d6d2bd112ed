"""Plans reach the other ranks unchanged, and a failed step ends the worker."""

import msgspec
import numpy as np
import pytest

from runtime.ipc.array_codec import decode_array, encode_array
from runtime.requests.extra_spec import ExtraSpec
from runtime.requests.request_spec import RowSpec
from runtime.requests.sampling_params import SamplingParams
from runtime.step.step_plan import (
    EmbedSpan,
    PageUpdate,
    ReportSpan,
    RowJoin,
    StepPlan,
    StepResult,
    WindowUpdate,
)
from runtime.worker.ranks import BroadcastRunner
from runtime.worker.stages import StagedRunner


def plan() -> StepPlan:
    return StepPlan(
        rows=np.array([4, 0, 2], dtype=np.int64),
        num_decodes=1,
        start_lens=np.array([9, 0, 16], dtype=np.int64),
        query_lens=np.array([1, 3, 2], dtype=np.int64),
        chunk_tokens=np.array([5, 6, 7, 8, 9], dtype=np.int32),
        samples=np.array([True, False, True]),
        joins=[
            RowJoin(
                row=0,
                spec=RowSpec(
                    sampling=SamplingParams(temperature=0.5, seed=-3, logit_bias={7: 1.5}),
                    extras=[ExtraSpec("hidden_states", b"params", prompt_start=0)],
                ),
                num_prompt=3,
                output_ids=np.array([11, 12], dtype=np.int32),
                has_grammar=True,
            )
        ],
        page_updates=[PageUpdate(0, 1, np.array([3, 4], dtype=np.int32))],
        report_spans=[ReportSpan(1, "hidden_states", 0, np.array([6, 7], dtype=np.int32))],
        embed_spans=[EmbedSpan(3, 2, np.array([[1, 2], [3, 4]], dtype=np.float32).tobytes())],
        windows=WindowUpdate(*(np.array([5, 6], dtype=np.int32) for _ in range(2))),
    )


def test_a_plan_arrives_as_it_was_sent():
    sent = plan()
    data = msgspec.msgpack.encode(sent, enc_hook=encode_array)
    got = msgspec.msgpack.decode(data, type=StepPlan, dec_hook=decode_array)
    for name in ("rows", "start_lens", "query_lens", "chunk_tokens", "samples"):
        ours, theirs = getattr(sent, name), getattr(got, name)
        assert theirs.dtype == ours.dtype
        assert theirs.flags.writeable
        np.testing.assert_array_equal(theirs, ours)
    assert got.num_decodes == 1
    (join,), (update,) = got.joins, got.page_updates
    assert (join.row, join.num_prompt) == (0, 3)
    assert join.spec == sent.joins[0].spec
    assert join.output_ids.tolist() == [11, 12]
    assert join.has_grammar
    (span,) = got.report_spans
    assert (span.index, span.extra, span.offset) == (1, "hidden_states", 0)
    assert span.next_tokens.tolist() == [6, 7]
    assert got.windows is not None
    assert got.windows.pages.tolist() == got.windows.window_pages.tolist() == [5, 6]
    assert got.embed_spans == sent.embed_spans
    assert (update.row, update.start, update.pages.tolist()) == (0, 1, [3, 4])


@pytest.mark.parametrize("data", [b"\0" * 7, "text", None])
def test_an_invalid_array_is_rejected(data):
    message = msgspec.msgpack.encode([0, 1, data])
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(message, type=PageUpdate, dec_hook=decode_array)
    with pytest.raises(NotImplementedError):
        msgspec.msgpack.encode(np.zeros((2, 2)), enc_hook=encode_array)


class _Ranks:
    def __init__(self):
        self.sent = []

    def send(self, plan):
        self.sent.append(plan)

    def give_up(self, why, error):
        raise SystemExit(why)


class _Runner:
    def __init__(self, error=None):
        self.error = error

    def launch(self, plan, masks):
        if self.error is not None:
            raise self.error
        return plan


def test_every_plan_is_sent_before_it_is_launched():
    ranks = _Ranks()
    one = plan()
    assert BroadcastRunner(_Runner(), ranks).launch(one) is one
    assert ranks.sent == [one]


def test_a_failed_step_ends_the_worker():
    with pytest.raises(SystemExit, match="rank 0"):
        BroadcastRunner(_Runner(RuntimeError("lost")), _Ranks()).launch(plan())


class _LastStage:
    """Computes the last stage: each row's token is the number of the step, from 1 on."""

    def __init__(self):
        self.computed = []

    def launch(self, plan, masks):
        del masks
        self.computed.append(plan)
        return self

    def wait(self):
        num = len(self.computed[-1].sample_rows)
        return StepResult(np.full(num, len(self.computed), dtype=np.int32))


def step(rows: list[int], num_decodes: int) -> StepPlan:
    """One token for each row: those that decode, then prompts of one token."""
    lens = np.ones(len(rows), dtype=np.int64)
    return StepPlan(
        rows=np.array(rows, dtype=np.int64),
        num_decodes=num_decodes,
        start_lens=lens,
        query_lens=lens,
        chunk_tokens=np.zeros(len(rows) - num_decodes, dtype=np.int32),
        samples=lens.astype(bool),
    )


def test_stages_get_a_step_before_the_last_one_computes_the_step_before():
    ranks, last = _Ranks(), _LastStage()
    runner = StagedRunner(last, ranks)
    one = runner.launch(step([4, 2], 0))
    two = runner.launch(step([1], 0))
    assert len(ranks.sent) == 2
    assert last.computed == []
    assert one.wait().token_ids.tolist() == [1, 1]
    assert two.wait().token_ids.tolist() == [2]
    # The first stage is told the last tokens, each row's own.
    runner.launch(step([1, 2, 4], 3))
    assert ranks.sent[-1].decode_tokens.tolist() == [2, 1, 1]


def test_a_failed_step_of_the_last_stage_ends_the_worker():
    pending = StagedRunner(_Runner(RuntimeError("lost")), _Ranks()).launch(step([0], 0))
    with pytest.raises(SystemExit, match="rank 0"):
        pending.wait()
