"""Records agents' sessions from a server's request log, without their texts.

    headrace serve --model-path DIR --log-requests --log-requests-level 3 --log-format json 2> LOG
    python -m benchmarks.session_trace LOG --model-path DIR --out sessions.jsonl

`benchmarks.fleet --sessions sessions.jsonl` routes the recording. A line of it is a request, in the
format of Mooncake's traces with two keys of AIPerf and one of our own:

    timestamp         when the request arrived, milliseconds after the first one
    input_length      number of prompt tokens
    output_length     number of tokens of the answer's text
    hash_ids          for each block of the prompt, the last one perhaps partial, a number. Two
                      blocks have the same number if they and everything before them are equal
    session_id        the session; without it, each line is a session of its own
    delay             milliseconds from the end of the session's previous request to the arrival
    answer_hash_ids   numbers of the whole blocks of prompt and output together, from the first
                      block on that the prompt does not fill

A block has 16 tokens, and 512 in Mooncake's own traces. A file whose name ends in `.gz` is
compressed.

A server's log does not say which requests are of one session. A request continues an earlier one
if its prompt begins with that one's prompt, except perhaps the last eight tokens. It then belongs
to the session of the longest such prompt.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from runtime.text.tokenizer import Tokenizer

BLOCK = 16
# So many tokens at the end of a prompt, which begin the answer, may be others in the next prompt.
_CHANGED_TOKENS = 8


class TracedRequest(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A line of a trace; the module describes the keys."""

    timestamp: float = 0.0
    input_length: int
    output_length: int
    hash_ids: list[int]
    session_id: str = ""
    delay: float = 0.0
    answer_hash_ids: list[int] = []


_DECODER = msgspec.json.Decoder(TracedRequest)


def read_trace(path: Path) -> list[list[TracedRequest]]:
    """Read a trace.

    Returns:
        The sessions in the order of their first requests, each with its requests in order.

    Raises:
        ValueError: a line is not a request; the message names it.
    """
    sessions: dict[str, list[TracedRequest]] = {}
    data = path.read_bytes()
    data = gzip.decompress(data) if path.suffix == ".gz" else data
    for number, line in enumerate(data.splitlines(), 1):
        try:
            request = _DECODER.decode(line)
        except msgspec.DecodeError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        sessions.setdefault(request.session_id or f"line {number}", []).append(request)
    return list(sessions.values())


def write_trace(path: Path, requests: Iterable[TracedRequest]) -> None:
    """Write a trace."""
    data = b"".join(msgspec.json.encode(each) + b"\n" for each in requests)
    # Without the time, so that the same trace is the same file.
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)


class Blocks:
    """Numbers blocks of tokens: equal blocks with equal tokens before them get one number."""

    def __init__(self, size: int = BLOCK) -> None:
        """Number blocks of `size` tokens."""
        self._size = size
        self._ids: dict[tuple[int, bytes], int] = {}

    def ids(self, tokens: list[int], *, with_partial: bool) -> list[int]:
        """Return the numbers of the blocks of `tokens`."""
        found, before = [], -1
        length = len(tokens) if with_partial else len(tokens) // self._size * self._size
        for start in range(0, length, self._size):
            block = np.array(tokens[start : start + self._size], dtype=np.int32).tobytes()
            before = self._ids.setdefault((before, block), len(self._ids))
            found.append(before)
        return found


def block_tokens(ids: Iterable[int], size: int, vocab_size: int) -> NDArray[np.int32]:
    """Return tokens for numbered blocks: those of different numbers differ, as far as possible."""
    numbers = np.fromiter(ids, dtype=np.int64)[:, None]
    mixed = (numbers * 2_654_435_761 + np.arange(size) * 40_503) % 2**32 % vocab_size
    mixed[:, 0] = numbers[:, 0] % vocab_size
    mixed[:, 1] = numbers[:, 0] // vocab_size % vocab_size
    return mixed.astype(np.int32).ravel()


@dataclass
class _Logged:
    began_s: float
    ended_s: float
    prompt: list[int]
    output: list[int]


@dataclass
class _Session:
    name: str
    ended_s: float
    prompts: list[list[int]] = field(default_factory=list)


def _logged(lines: Iterable[str], tokenizer: Tokenizer) -> Iterator[_Logged]:
    for line in lines:
        facts = _facts(line)
        if facts is None:
            continue
        ended_s = datetime.fromisoformat(facts["time"]).timestamp()
        prompt, output = (
            tokenizer.encode(facts[key], add_special_tokens=False)
            for key in ("prompt_text", "output_text")
        )
        yield _Logged(ended_s - facts["e2e"], ended_s, prompt, output)


def _facts(line: str) -> Mapping[str, Any] | None:
    """Return the facts of a request's line; `None` for other lines, and requests without output."""
    try:
        facts = json.loads(line)
    except json.JSONDecodeError:
        return None
    if not isinstance(facts, dict) or "output_text" not in facts or not facts.get("output"):
        return None
    return facts


def record(lines: Iterable[str], tokenizer: Tokenizer) -> list[TracedRequest]:
    """Make a trace from the lines of a server's log.

    Args:
        lines: of `--log-requests-level 3 --log-format json`. Other lines are ignored.
        tokenizer: encodes the texts.
    """
    blocks = Blocks()
    sessions: list[_Session] = []
    found: list[TracedRequest] = []
    logged = sorted(_logged(lines, tokenizer), key=lambda each: each.began_s)
    for each in logged:
        session = _session_of(each.prompt, sessions)
        if session is None:
            session = _Session(str(len(sessions)), each.began_s)
            sessions.append(session)
        delay_s = max(each.began_s - session.ended_s, 0.0)
        session.ended_s = max(session.ended_s, each.ended_s)
        session.prompts.append(each.prompt)
        ids = blocks.ids(each.prompt, with_partial=True)
        both = blocks.ids(each.prompt + each.output, with_partial=False)
        found.append(
            TracedRequest(
                timestamp=round(1000 * (each.began_s - logged[0].began_s), 1),
                input_length=len(each.prompt),
                output_length=len(each.output),
                hash_ids=ids,
                session_id=session.name,
                delay=round(1000 * delay_s, 1),
                answer_hash_ids=both[len(each.prompt) // BLOCK :],
            )
        )
    return found


def _session_of(prompt: list[int], sessions: list[_Session]) -> _Session | None:
    """Return the session that a prompt continues; `None` if it begins one."""
    best, most = None, 0
    for session in sessions:
        for earlier in session.prompts:
            needed = max(len(earlier) - _CHANGED_TOKENS, 1)
            if needed > most and prompt[:needed] == earlier[:needed]:
                best, most = session, needed
    return best


def main() -> None:
    """Write a trace."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("log", type=Path, help="what the server wrote to standard error")
    parser.add_argument("--model-path", type=Path, required=True, help="has the tokenizer")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    tokenizer = Tokenizer.from_folder(options.model_path)
    with options.log.open() as lines:
        requests = record(lines, tokenizer)
    write_trace(options.out, requests)
    num_sessions = len({each.session_id for each in requests})
    print(f"{len(requests)} requests of {num_sessions} sessions: {options.out}")


if __name__ == "__main__":
    main()
