"""A stream that goes on in another detokenizer shows each character once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.ipc.messages import FinishReason
from runtime.text.detokenizer import Detokenizer
from runtime.text.tokenizer import Tokenizer
from tests.support.text_strategies import SNIPPETS, splits, texts
from tests.support.tiny_tokenizers import KINDS
from tests.unit.text.test_engine import LENGTH, Run, message, pack, start, unpack

PROPERTY = settings(max_examples=60, deadline=None, derandomize=True, database=None)


class Interrupted:
    """A request whose detokenizer is replaced before some of its steps."""

    def __init__(self, tokenizer, steps, deaths, **changes):
        self.text, self.ids = "", []
        self.reason: FinishReason | None = None
        self.firsts = 0
        detokenizer, starts = Detokenizer(tokenizer), [start(**changes)]
        for index, step in enumerate(steps):
            if index in deaths:
                detokenizer = Detokenizer(tokenizer)
                known = {"output_ids": pack(self.ids), "num_shown": len(self.text)}
                starts = [start(**changes, **known)]
                # The scheduler computes again what had not arrived.
                done = [each for before in steps[:index] for each in before][len(self.ids) :]
                step = [*done, *step]
            out, _ = detokenizer.step(
                message(starts, {1: step}, {1: LENGTH} if index == len(steps) - 1 else {})
            )
            starts = []
            for delta in out.deltas:
                self.text += delta.text
                self.ids += unpack(delta.token_ids)
                self.reason = delta.reason
                self.firsts += delta.cached_tokens >= 0
            if self.reason is not None:
                return


@pytest.mark.parametrize("cleans", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupted_stream_is_an_undisturbed_one(kind, cleans):
    tokenizer = Tokenizer(
        KINDS[kind](), {"eos_token": "</s>", "clean_up_tokenization_spaces": cleans}
    )

    @PROPERTY
    @given(
        texts,
        st.lists(st.sampled_from(SNIPPETS) | st.text(min_size=1, max_size=3), max_size=2),
        st.booleans(),
        st.integers(1, 4),
        st.sets(st.integers(0, 12), max_size=3),
        st.data(),
    )
    def check(text, stops, streams, interval, deaths, data):
        steps = splits(data, tokenizer.encode(text, add_special_tokens=False))
        options = {"stop": stops, "stream": streams, "stream_interval": interval}
        whole = Run(tokenizer, steps, **options)
        parts = Interrupted(tokenizer, steps, deaths, **options)
        assert (parts.text, parts.ids, parts.reason) == (whole.text, whole.ids, whole.reason)
        # Its reader learns once how much was cached.
        assert parts.firsts == 1

    check()
