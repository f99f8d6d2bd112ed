"""`logprobs.content` spells `message.content` for any tokens, parsers and cuts."""

from __future__ import annotations

import array
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion

from openai_api.answer_logprobs import AnswerLogprobs
from openai_api.output_parser import ContentText, OutputParser
from openai_api.reasoning_parsers.reasoning_parser import thought_texts
from openai_api.reasoning_parsers.registry import REASONING_PARSERS
from openai_api.tool_parsers.registry import TOOL_PARSERS
from runtime.client.generation_stream import GenerationChunk
from runtime.extras.logprobs.positions import LogprobArrays
from runtime.ipc.messages import FinishReason
from runtime.requests.extra_spec import ExtraBlock
from runtime.text.decoder_choice import DecoderFactory
from runtime.text.stop_search import StopMatcher
from runtime.text.thoughts import ThoughtScan
from runtime.text.token_pieces import TokenPieces
from runtime.text.tokenizer import Tokenizer
from tests.support.fake_engine import byte_tokenizer
from tests.support.tiny_tokenizers import KINDS
from tests.unit.openai_api.conftest import events_of

PROPERTY = settings(max_examples=60, deadline=None, derandomize=True, database=None)
KIMI = "\u25c1think\u25b7"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
PIECES = [
    *("<think>\n", "\n</think>\n\n", CALL, "<tool_call>", "<", "</", "\n", "sum ", "a b"),
    *("Yes. ", " , it's ", " do n't ", "\u201cquoted\u201d ", "\U0001f600"),
]


def chunks_of(
    tokenizer: Tokenizer, ids: list[int], size: int, stop: str | None
) -> list[GenerationChunk]:
    """What a client hears of tokens, in chunks of `size`; a token's place is its value."""
    decoder = DecoderFactory(tokenizer).create(skip_special_tokens=True)
    matcher = StopMatcher([stop] if stop else [], keep_match=False)
    chunks: list[GenerationChunk] = []
    for begin in range(0, len(ids), size):
        part = ids[begin : begin + size]
        text = "".join(matcher.push(decoder.push(each)) for each in part)
        is_last = begin + size >= len(ids) or matcher.matched is not None
        if is_last:
            text += matcher.push(decoder.finish()) + matcher.finish()
        values = array.array("f", range(begin, begin + len(part)))
        block = ExtraBlock(1, "logprobs", False, LogprobArrays(values.tobytes()).encode())
        reason = FinishReason("stop") if is_last else None
        chunks.append(GenerationChunk(text, part, reason, 1, 0, extras=[block]))
        if is_last:
            break
    return chunks


def told(
    tokenizer: Tokenizer, chunks: list[GenerationChunk], reasoning: str | None, tools: str | None
) -> tuple[str, list[dict[str, Any]]]:
    """The content, and its entries."""
    kind = None if reasoning is None else REASONING_PARSERS.load(reasoning)
    functions = {"add": {"type": "object"}}
    parser = OutputParser(
        None if kind is None else kind(prompt_is_open=False),
        None if tools is None else TOOL_PARSERS.load(tools)(functions, max_calls=None),
    )
    scan = None
    if kind is not None and kind.splits:
        scan = ThoughtScan(thought_texts(kind, prompt_is_open=False, may_call=True))
    pieces = TokenPieces(tokenizer)
    decoder = pieces.decoder(skip_special_tokens=True, prompt_tail=[])
    logprobs = AnswerLogprobs(pieces, decoder, scan)
    content, entries = "", []
    for chunk in chunks:
        events = parser.feed(chunk.text)
        if chunk.finish_reason is not None:
            events += parser.finish()
        content += "".join(each.text for each in events if isinstance(each, ContentText))
        logprobs.add(chunk, events)
        entries += orjson.loads(b"".join(logprobs.take()["content"].pieces()))
    return content, entries


@pytest.mark.parametrize(
    ("reasoning", "tools"),
    [(None, None), ("qwen3", None), ("qwen3", "hermes"), ("minimax-append-think", None)],
)
@pytest.mark.parametrize("kind", [*KINDS, "bytes", "cleaned"])
def test_entries_spell_the_content(kind: str, reasoning: str | None, tools: str | None) -> None:
    if kind == "bytes":
        tokenizer = byte_tokenizer()
    else:
        cleans = {"clean_up_tokenization_spaces": True} if kind == "cleaned" else {}
        make = KINDS["llama3" if kind == "cleaned" else kind]
        tokenizer = Tokenizer(make(), {"eos_token": "</s>", **cleans})

    @PROPERTY
    @given(
        st.lists(st.sampled_from(PIECES), max_size=7),
        st.integers(1, 9),
        st.sampled_from([None, "sum", ". ", "it"]),
    )
    def check(pieces: list[str], size: int, stop: str | None) -> None:
        ids = tokenizer.encode("".join(pieces), add_special_tokens=False)
        if not ids:
            return
        whole = chunks_of(tokenizer, ids, len(ids), stop)
        streamed = chunks_of(tokenizer, ids, size, stop)
        for chunks in (whole, streamed):
            content, entries = told(tokenizer, chunks, reasoning, tools)
            # This parser puts back what the prompt opened: no token says it.
            spelled = content.removeprefix("<think>") if "append" in str(reasoning) else content
            data = bytes(byte for each in entries for byte in each["bytes"])
            assert data.decode(errors="replace") == spelled
            places = [each["logprob"] for each in entries]
            assert places == sorted(places)
            for each in entries:
                assert each["token"] == bytes(each["bytes"]).decode(errors="replace")

    check()


REPLIES = [
    ("Yes.", "Yes."),
    ("<think>\nhm, it\n</think>\n\nIt is.", "It is."),
    (f"<think>\nhm\n</think>\n\nLook:\n{CALL}", "Look:"),
    ("<think>\nit never ends", ""),
    (f"<think>hm</think>{CALL}\n", ""),
]


@pytest.mark.parametrize(("reply", "content"), REPLIES)
@pytest.mark.parametrize("step_tokens", [1, 5])
@pytest.mark.parametrize("stream", [False, True])
async def test_chat(
    make_front: Any, reply: str, content: str, step_tokens: int, stream: bool
) -> None:
    front = make_front(
        lambda _: reply,
        reasoning="qwen3",
        tools="hermes",
        engine_options={"step_tokens": step_tokens},
    )
    answer = await front.chat(logprobs=True, top_logprobs=2, tools=[TOOL], stream=stream)
    if not stream:
        (choice,) = ChatCompletion.model_validate(answer.json()).choices
        assert choice.logprobs is not None
        entries = choice.logprobs.content or []
        assert "".join(each.token for each in entries) == (choice.message.content or "")
        assert (choice.message.content or "") == content
        return
    text = spelled = ""
    for event in events_of(answer):
        for each in event["choices"]:
            text += each["delta"].get("content") or ""
            found = (each["logprobs"] or {"content": []})["content"]
            spelled += "".join(entry["token"] for entry in found)
            assert all(len(entry["top_logprobs"]) == 2 for entry in found)
    assert text == spelled == content


@pytest.mark.parametrize(("reply", "content"), REPLIES)
@pytest.mark.parametrize("stream", [False, True])
async def test_responses(make_front: Any, reply: str, content: str, stream: bool) -> None:
    front = make_front(lambda _: reply, reasoning="qwen3", tools="hermes")
    tool = {"type": "function", "name": "add", "parameters": {"type": "object"}}
    body = {"input": "Hi", "top_logprobs": 1, "tools": [tool], "stream": stream}
    answer = await front.post("/v1/responses", body)
    if stream:
        last = answer.text.strip().rpartition("data: ")[2]
        response = orjson.loads(last)["response"]
    else:
        response = answer.json()
    parts = [
        part for item in response["output"] if item["type"] == "message" for part in item["content"]
    ]
    assert "".join(part["text"] for part in parts) == content
    for part in parts:
        assert "".join(each["token"] for each in part["logprobs"]) == part["text"]


@pytest.mark.parametrize(
    ("reasoning", "reply", "thought"),
    [
        # No token of these tags is one token.
        ("kimi", f"{KIMI}hm, hm\u25c1/think\u25b7\n\nYes.", f"{KIMI}hm, hm\u25c1/think\u25b7"),
        ("kimi", f"Yes. {KIMI}", ""),
        ("kimi", f"{KIMI}it never ends", f"{KIMI}it never ends"),
        ("qwen3", "<think>\nhm\n</think>\n\nYes.", "<\nhm\n>"),
    ],
)
@pytest.mark.parametrize("step_tokens", [1, 4])
@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_of_thoughts_are_counted(
    make_front: Any, reasoning: str, reply: str, thought: str, step_tokens: int, stream: bool
) -> None:
    front = make_front(
        lambda _: reply, reasoning=reasoning, engine_options={"step_tokens": step_tokens}
    )
    answer = await front.chat(
        stream=stream, stream_options={"include_usage": True} if stream else None
    )
    usage = events_of(answer)[-1]["usage"] if stream else answer.json()["usage"]
    assert usage["reasoning_tokens"] == len(thought.encode())
