"""Prompts and lengths in sentence-transformers folders, in the old and the new format."""

import json
from pathlib import Path

import pytest

from runtime.checkpoint.sentence_transformers import (
    Pooling,
    TextPrompts,
    read_pooling,
    read_prompts,
    read_text_limit,
)
from runtime.errors import StartupError


def prompts_of(folder: Path, **values: object) -> TextPrompts:
    (folder / "config_sentence_transformers.json").write_text(json.dumps(values))
    return read_prompts(folder)


def pooling_of(folder: Path, **values: object) -> Pooling:
    modules = [("base.modules.transformer.Transformer", ""), ("pooling.Pooling", "1_Pooling")]
    listed = [{"type": f"sentence_transformers.{kind}", "path": path} for kind, path in modules]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(values))
    return read_pooling(folder, "mean", 32)


def test_prompts(tmp_path: Path) -> None:
    assert read_prompts(tmp_path) == TextPrompts()
    assert prompts_of(tmp_path, prompts=None, similarity_fn_name="cosine") == TextPrompts()
    named = {"query": "Question: ", "document": None}
    found = prompts_of(tmp_path, prompts=named, default_prompt_name="query")
    assert found == TextPrompts({"query": "Question: ", "document": ""}, "query")


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"prompts": ["query"]}, "an object"),
        ({"prompts": {"query": 5}}, "a text for each name"),
        ({"default_prompt_name": "query"}, "no prompts"),
        ({"prompts": {"a": "b"}, "default_prompt_name": ["a"]}, "one of a"),
    ],
)
def test_prompts_that_cannot_be_read(tmp_path: Path, values: dict[str, object], named: str) -> None:
    with pytest.raises(StartupError, match=named):
        prompts_of(tmp_path, **values)


def test_pooling_in_both_spellings(tmp_path: Path) -> None:
    for new, old in (("mean", "mean_tokens"), ("cls", "cls_token"), ("lasttoken", "lasttoken")):
        found = pooling_of(tmp_path, embedding_dimension=32, pooling_mode=new)
        assert found == pooling_of(tmp_path, **{f"pooling_mode_{old}": True})
        assert found.include_prompt
    assert not pooling_of(tmp_path, pooling_mode="mean", include_prompt=False).include_prompt


@pytest.mark.parametrize("mode", ["max", ["mean", "cls"], {}, 5])
def test_pooling_that_is_not_supported(tmp_path: Path, mode: object) -> None:
    with pytest.raises(StartupError, match="one of mean, cls, lasttoken"):
        pooling_of(tmp_path, pooling_mode=mode)


@pytest.mark.parametrize("name", ["sentence_bert_config.json", "sentence_xlm-roberta_config.json"])
def test_the_length_of_texts(tmp_path: Path, name: str) -> None:
    assert read_text_limit(tmp_path) is None
    for written, found in (({"max_seq_length": 256, "do_lower_case": False}, 256), ({}, None)):
        (tmp_path / name).write_text(json.dumps(written))
        assert read_text_limit(tmp_path) == found


@pytest.mark.parametrize(
    "written", [{"max_seq_length": "256"}, {"max_seq_length": -1}, {"do_lower_case": True}]
)
def test_a_length_that_makes_no_sense_is_one_line(tmp_path: Path, written: object) -> None:
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps(written))
    with pytest.raises(StartupError, match=r"sentence_bert_config.json: '(max_seq|do_lower).*; "):
        read_text_limit(tmp_path)
