"""Requests have the lengths that were asked for and repeat with their seed."""

import argparse
import json
import random
from pathlib import Path

import pytest

from headrace.bench.datasets import (
    TokenSource,
    add_dataset_options,
    jsonl_requests,
    make_requests,
    random_requests,
    shared_prefix_requests,
)
from headrace.bench.shapes import SHAPES, write_shape
from runtime.checkpoint.demo import TOY_FOLDER
from runtime.errors import StartupError
from runtime.text.tokenizer import Tokenizer


def source(seed: int = 0, tokenizer: Tokenizer | None = None) -> TokenSource:
    size = tokenizer.vocab_size if tokenizer else 500
    return TokenSource(random.Random(seed), size, tokenizer)


def options(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_dataset_options(parser)
    return parser.parse_args(arguments)


def test_random_requests_repeat_with_their_seed() -> None:
    first = random_requests(source(3), 5, 20, 10)
    assert first == random_requests(source(3), 5, 20, 10)
    assert first != random_requests(source(4), 5, 20, 10)
    assert {len(request.input_ids or ()) for request in first} == {20}
    assert {request.output_len for request in first} == {10}


def test_range_ratio_draws_lengths_between() -> None:
    lengths = {r.prompt_len for r in random_requests(source(), 300, 20, 10, range_ratio=0.5)}
    assert lengths == set(range(10, 21))


def test_special_tokens_are_not_drawn() -> None:
    tokenizer = Tokenizer.from_folder(TOY_FOLDER)
    drawn = set(source(0, tokenizer).ids(50_000))
    assert not drawn & tokenizer.special_ids


@pytest.mark.parametrize("which", ["toy", "shape"])
def test_random_text_has_exactly_as_many_tokens(which: str, tmp_path: Path) -> None:
    folder = TOY_FOLDER if which == "toy" else write_shape("tiny", tmp_path)
    tokenizer = Tokenizer.from_folder(folder)
    requests = random_requests(source(0, tokenizer), 10, 64, 8)
    lengths = [len(tokenizer.encode(request.text or "")) for request in requests]
    assert lengths == [request.prompt_len for request in requests]
    assert set(lengths) == {64}


def test_shared_prefix() -> None:
    prefix = source(1).ids(32)
    requests = shared_prefix_requests(source(), 4, prefix, 8, 2)
    assert all((request.input_ids or [])[:32] == prefix for request in requests)
    assert len({tuple(request.input_ids or ()) for request in requests}) == 4
    assert requests[0].prompt_len == 40


def test_lines_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    lines = [
        {"prompt": "Hello", "output_len": 5},
        {"prompt": [1, 2, 3]},
        {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 7},
        {"input_ids": [4, 5], "ignored": True},
    ]
    path.write_text("\n\n".join(json.dumps(line) for line in lines))
    requests = jsonl_requests(path, None, 9)
    assert [request.output_len for request in requests] == [5, 9, 7, 9]
    assert requests[1].input_ids == [1, 2, 3]
    assert requests[2].messages == [{"role": "user", "content": "Hi"}]
    assert len(jsonl_requests(path, 10, 9)) == 10
    assert len(jsonl_requests(path, 2, 9)) == 2


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "no requests"),
        ("{}", "line 1: needs one of"),
        ('{"prompt": "a"}\nnonsense', "line 2"),
        ('{"prompt": "a", "text": "b", "messages": []}', "needs one of"),
        ('{"prompt": 5}', "line 1"),
        ('{"prompt": "a"}\n{"prompt": "a", "output_len": 0}', "line 2: output_len must be"),
        ('{"prompt": "a", "max_tokens": -1}', "line 1: output_len must be"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text(content)
    with pytest.raises(StartupError, match=words):
        jsonl_requests(path, None, 9)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--num-prompts", "0"),
        ("--random-range-ratio", "2"),
        ("--random-input-len", "0"),
        ("--dataset-name", "jsonl"),
        ("--dataset-name", "jsonl", "--dataset-path", "/none"),
    ],
)
def test_wrong_options_are_one_line(arguments: tuple[str, ...]) -> None:
    with pytest.raises(StartupError):
        make_requests(options(*arguments), source())


def test_shapes_say_what_they_are(tmp_path: Path) -> None:
    for shape, values in SHAPES.items():
        if values["vocab_size"] > 10_000:
            continue
        folder = write_shape(shape, tmp_path / shape)
        tokenizer = Tokenizer.from_folder(folder)
        assert tokenizer.vocab_size == values["vocab_size"]
        text = tokenizer.decode(list(range(256, 300)))
        assert tokenizer.encode(text) == list(range(256, 300))
