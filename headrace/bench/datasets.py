"""Makes the requests of a benchmark: random tokens, a shared prefix, or lines of a file."""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from headrace.bench.bench_options import check_at_least
from headrace.bench.record import BenchRequest
from runtime.errors import StartupError
from runtime.text.tokenizer import Tokenizer

DATASETS = ("random", "shared-prefix", "jsonl")
# Token ids below this number exist in every model, and have few digits in a request's body.
DEFAULT_VOCAB_SIZE = 4000
_TEXT_TRIES = 20
_MAX_TEXT_IDS = 4096


class TokenSource:
    """Draws random prompts: lists of token ids, or texts if a tokenizer is given."""

    def __init__(
        self, rng: random.Random, vocab_size: int, tokenizer: Tokenizer | None = None
    ) -> None:
        """Use token ids from 1 to `vocab_size - 1`.

        With a tokenizer, only tokens are used that are the same after decoding and encoding.
        """
        self.rng = rng
        self.tokenizer = tokenizer
        self._plain = range(1, vocab_size) if tokenizer is None else self._stable(vocab_size)

    def _stable(self, vocab_size: int) -> Sequence[int]:
        # Special tokens and parts of characters change when they are decoded and encoded again.
        tokenizer = self.tokenizer
        assert tokenizer is not None
        ids = self.rng.sample(range(1, vocab_size), min(vocab_size - 1, _MAX_TEXT_IDS))
        plain = [i for i in ids if i not in tokenizer.special_ids]
        texts = tokenizer.decode_batch([[i] for i in plain])
        again = tokenizer.encode_batch(texts, add_special_tokens=False)
        return [i for i, back in zip(plain, again, strict=True) if back == [i]] or plain

    def ids(self, count: int) -> list[int]:
        """Return `count` random token ids."""
        return self.rng.choices(self._plain, k=count)

    def request(self, input_ids: list[int], output_len: int) -> BenchRequest:
        """Make a request with these token ids.

        With a tokenizer, the request has a text that encodes to exactly as many tokens.
        """
        if self.tokenizer is None:
            return BenchRequest(
                input_ids=input_ids, output_len=output_len, prompt_len=len(input_ids)
            )
        text, count = self._text(input_ids, self.tokenizer)
        return BenchRequest(text=text, output_len=output_len, prompt_len=count)

    def _text(self, input_ids: list[int], tokenizer: Tokenizer) -> tuple[str, int]:
        # Neighbouring tokens may merge into other tokens when their text is encoded. A text that
        # was encoded once mostly stays the same, so the new ids are kept and only the end of the
        # text is drawn again. Each try draws a longer end.
        wanted = len(input_ids)
        ids = input_ids
        for attempt in range(_TEXT_TRIES):
            text = tokenizer.decode(ids)
            ids = tokenizer.encode(text, add_special_tokens=False)
            if len(ids) == wanted:
                return text, wanted
            kept = ids[: max(0, wanted - 2 * attempt)]
            ids = kept + self.ids(wanted - len(kept))
        return text, len(tokenizer.encode(text, add_special_tokens=False))


def random_requests(
    source: TokenSource, count: int, input_len: int, output_len: int, range_ratio: float = 1.0
) -> list[BenchRequest]:
    """Make requests whose prompts are random tokens.

    Args:
        source: draws the tokens and the lengths.
        count: number of requests.
        input_len: longest prompt, tokens.
        output_len: longest output, tokens.
        range_ratio: lengths are uniform between `range_ratio` times the longest and the longest.
    """

    def draw(most: int) -> int:
        return source.rng.randint(max(1, int(most * range_ratio)), most)

    return [source.request(source.ids(draw(input_len)), draw(output_len)) for _ in range(count)]


def shared_prefix_requests(
    source: TokenSource, count: int, prefix: Sequence[int], own_len: int, output_len: int
) -> list[BenchRequest]:
    """Make requests whose prompts are `prefix` and then `own_len` random tokens."""
    return [source.request([*prefix, *source.ids(own_len)], output_len) for _ in range(count)]


class _Line(msgspec.Struct):
    prompt: str | list[int] | None = None
    text: str | None = None
    input_ids: list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    output_len: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None


def jsonl_requests(path: Path, count: int | None, output_len: int) -> list[BenchRequest]:
    """Read requests from a file of JSON lines; if it has fewer than `count` lines, repeat them.

    Args:
        path: each line has `prompt`, `text`, `input_ids` or `messages`, and perhaps `output_len`.
        count: number of requests; by default all lines once.
        output_len: output tokens of the lines without `output_len`.

    Raises:
        StartupError: the file cannot be read, or a line is invalid; the message has its number.
    """
    decoder = msgspec.json.Decoder(_Line)
    requests = []
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise StartupError(f"--dataset-path {path}: {error.strerror}.") from None
    for number, raw in enumerate(lines, 1):
        if not raw.strip():
            continue
        try:
            line = decoder.decode(raw)
        except msgspec.DecodeError as error:
            raise StartupError(f"{path}, line {number}: {error}") from None
        ids = line.input_ids if not isinstance(line.prompt, list) else line.prompt
        text = line.prompt if isinstance(line.prompt, str) else line.text
        if sum(part is not None for part in (ids, text, line.messages)) != 1:
            raise StartupError(
                f"{path}, line {number}: needs one of prompt, text, input_ids and messages."
            )
        named = (line.output_len, line.max_tokens, line.max_completion_tokens, output_len)
        length = next(each for each in named if each is not None)
        if length < 1:
            raise StartupError(f"{path}, line {number}: output_len must be at least 1.")
        requests.append(
            BenchRequest(
                input_ids=ids,
                text=text,
                messages=line.messages,
                output_len=length,
                prompt_len=len(ids or ()),
            )
        )
    if not requests:
        raise StartupError(f"{path} holds no requests.")
    if count is None:
        return requests
    return (requests * (count // len(requests) + 1))[:count]


def add_dataset_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `make_requests` reads."""
    group = parser.add_argument_group("requests")
    group.add_argument("--dataset-name", choices=DATASETS, default="random")
    group.add_argument("--dataset-path", type=Path, help="file of the jsonl data set")
    group.add_argument("--num-prompts", type=int, help="requests (default 256; jsonl: all lines)")
    group.add_argument("--random-input-len", type=int, default=512, metavar="N")
    group.add_argument("--random-output-len", type=int, default=256, metavar="N")
    group.add_argument(
        "--random-range-ratio",
        type=float,
        default=1.0,
        metavar="R",
        help="lengths are drawn from [R x length, length]; 1 (the default) makes all equal",
    )
    group.add_argument(
        "--prefix-len", type=int, default=4096, metavar="N", help="tokens of the shared prefix"
    )
    group.add_argument("--seed", type=int, default=1, help="seed of prompts, lengths and arrivals")


def make_requests(options: argparse.Namespace, source: TokenSource) -> list[BenchRequest]:
    """Make the requests that the options describe.

    Raises:
        StartupError: an option or a file is wrong.
    """
    count = options.num_prompts
    check_at_least(1, options, "num_prompts", "random_input_len", "random_output_len", "prefix_len")
    if not 0 <= options.random_range_ratio <= 1:
        raise StartupError("--random-range-ratio must be between 0 and 1.")
    input_len, output_len = options.random_input_len, options.random_output_len
    if options.dataset_name == "jsonl":
        if options.dataset_path is None:
            raise StartupError("--dataset-name jsonl needs --dataset-path.")
        return jsonl_requests(options.dataset_path, count, output_len)
    if options.dataset_name == "shared-prefix":
        prefix = source.ids(options.prefix_len)
        return shared_prefix_requests(source, count or 256, prefix, input_len, output_len)
    return random_requests(source, count or 256, input_len, output_len, options.random_range_ratio)
