"""Streams merged into text: exact whatever the chunks hold."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.utils import async_stream_and_merge, stream_and_merge, trim_overlap

PIECES = st.lists(st.text(alphabet="ha0 \n|é", max_size=4), max_size=8)


class Recorded:
    """An engine that streams what it is told."""

    def __init__(self, pieces: list[str], *, cumulative: bool, says_delta: bool) -> None:
        self.chunks = []
        so_far = ""
        for piece in pieces:
            so_far += piece
            chunk = {"text": so_far if cumulative else piece}
            self.chunks.append({**chunk, "text_delta": piece} if says_delta else chunk)

    def generate(self, prompt, sampling_params, stream):
        assert stream
        return iter(self.chunks)

    async def async_generate(self, prompt, sampling_params, stream):
        async def chunks():
            for chunk in self.chunks:
                yield chunk

        return chunks()


@given(PIECES, st.booleans())
def test_engines_that_say_what_is_new_are_exact(pieces, cumulative):
    llm = Recorded(pieces, cumulative=cumulative, says_delta=True)
    assert stream_and_merge(llm, "p", {}) == "".join(pieces)


@given(PIECES)
def test_cumulative_streams_of_others_are_exact(pieces):
    llm = Recorded(pieces, cumulative=True, says_delta=False)
    assert stream_and_merge(llm, "p") == "".join(pieces)


async def test_the_asynchronous_one_yields_what_is_new():
    llm = Recorded(["ha", "", "ha", "ha"], cumulative=True, says_delta=True)
    assert [part async for part in async_stream_and_merge(llm, "p", {})] == ["ha", "ha", "ha"]


async def test_an_error_in_the_stream_is_raised():
    llm = Recorded(["ha"], cumulative=True, says_delta=False)
    llm.chunks.append({"error": {"message": "The input is too long.", "code": 400}})
    with pytest.raises(ValueError, match="too long"):
        stream_and_merge(llm, "p")
    parts = async_stream_and_merge(llm, "p")
    assert await anext(parts) == "ha"
    with pytest.raises(ValueError, match="too long"):
        await anext(parts)


@pytest.mark.parametrize(
    ("existing", "new", "rest"),
    [("ab", "abc", "c"), ("", "x", "x"), ("ab", "ab", ""), ("ha", "ha", ""), ("abc", "cd", "d")],
)
def test_trim_overlap(existing, new, rest):
    assert trim_overlap(existing, new) == rest
