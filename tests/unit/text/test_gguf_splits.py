"""Pre-tokenizers of GGUF files, against the same expressions in Python's `regex`."""

from __future__ import annotations

import json
import random
import unicodedata
from pathlib import Path

import gguf
import numpy as np
import pytest
import regex
from tokenizers.pre_tokenizers import ByteLevel

from runtime.text.gguf_tokenizer import SPLITS, gguf_tokenizer
from tests.support.tiny_tokenizers import CORPUS, SPECIALS, gemma

TEXT = (
    "Hello World, it's 2024!\n\n  def f(x):\r\n\treturn x_1 + 'DON'T'  # HTTPServer/URLs\n"
    "\u4eca\u5929\u5929\u6c14\u5f88\u597d\uff0c1234567\u5e74\u3002 \u30ab\u30bf\u30ab\u30ca "
    "\ud55c\uad6d\uc5b4 \u041f\u0440\u0438\u0432\u0435\u0442 na\u00efve \u10d0\u10d1   \n "
)
# What tells the kinds apart, as their sources' `tokenizer.json` or code splits it.
PIECES = {
    "deepseek-llm": {
        "a\n\nb": ["a", "\n", "\n", "b"],
        "ab 12\u4eca\u5929": ["ab", " ", "12", "\u4eca\u5929"],
        "x, y": ["x", ",", " y"],
        "a_b": ["a", "_", "b"],
    },
    "deepseek-coder": {"ab 12": ["ab", " ", "1", "2"], "x, \u0431": ["x", ",", " \u0431"]},
    "deepseek-v3": {
        "1234": ["123", "4"],
        ".append(x)": [".append", "(x", ")"],
        "\u4eca\u5929\u30ab!": ["\u4eca\u5929\u30ab", "!"],
    },
    "kimi-k2": {
        "ab\u4eca\u5929cd": ["ab", "\u4eca\u5929", "cd"],
        "HTTPServer's 1234": ["HTTPServer's", " ", "123", "4"],
    },
    "minimax-m2": {"don't 1234": ["don't", " ", "123", "4"], "a/\n": ["a", "/\n"]},
    "glm4": {"don't 1234": ["don", "'t", " ", "123", "4"]},
    "bailingmoe": {"don't\n\n12": ["don", "'t", "\n\n", "1", "2"]},
    "seed-coder": {"a;\n12": ["a", ";", "\n", "1", "2"]},
    "mellum": {"don't 1234": ["don", "'t", " 1234"]},
}


def pieces(folder: Path, pre: str, text: str) -> list[str]:
    """Split a text with the tokenizer of a file that names `pre`."""
    path = folder / f"{pre}.gguf"
    if not path.exists():
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(sorted(ByteLevel.alphabet()))
        writer.add_token_merges([])
        writer.add_tensor("token_embd.weight", np.zeros((1, 1), np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    backend, _, _ = gguf_tokenizer(path)
    assert backend.pre_tokenizer is not None
    spans = [span for _, span in backend.pre_tokenizer.pre_tokenize_str(text)]
    return [text[begin:end] for begin, end in spans]


@pytest.mark.parametrize("pre", PIECES)
def test_pieces(pre: str, tmp_path: Path) -> None:
    for text, expected in PIECES[pre].items():
        assert pieces(tmp_path, pre, text) == expected


def split(expressions: tuple[str, ...], text: str) -> list[str]:
    """Split by each expression in turn; what is between the matches stays a piece."""
    parts = [text]
    for expression in expressions:
        compiled = regex.compile(expression, regex.V1)
        parts = [
            piece
            for part in parts
            for piece in regex.split(f"({compiled.pattern})", part, flags=regex.V1)
            if piece
        ]
    return parts


@pytest.mark.parametrize("pre", [pre for pre in PIECES if pre in SPLITS])
def test_one_after_the_other(pre: str, tmp_path: Path) -> None:
    given = SPLITS[pre]
    expressions = (given,) if isinstance(given, str) else given
    chance = random.Random(5)
    texts = [TEXT, *("".join(chance.choices(TEXT, k=60)) for _ in range(200))]
    for text in texts:
        assert pieces(tmp_path, pre, text) == split(expressions, text)


def test_the_listed_letters_have_a_case() -> None:
    listed = regex.compile(SPLITS["deepseek-llm"][1].removeprefix(r"\s?"))
    letters = [chr(code) for code in range(0x20000) if listed.match(chr(code))]
    # Letters that were given to Unicode after the list was made are absent.
    assert len(letters) > 1900
    # A few are marks, or letters without a case among those of one script.
    assert {unicodedata.category(letter) for letter in letters} <= {"Lu", "Ll", "Lt", "Lo", "Cn"}


def test_the_merges_of_gemma_4_are_those_of_the_file(tmp_path: Path) -> None:
    source = gemma()
    model = json.loads(source.to_str())["model"]
    words = sorted(source.get_vocab(), key=source.get_vocab().__getitem__)
    kinds = [gguf.TokenType.BYTE if each.startswith("<0x") else 1 for each in words]
    writer = gguf.GGUFWriter(tmp_path / "one.gguf", "gemma4")
    writer.add_tokenizer_model("gemma4")
    writer.add_token_list(words)
    writer.add_token_types(
        [3 if each in SPECIALS else kind for each, kind in zip(words, kinds, strict=True)]
    )
    writer.add_token_merges([" ".join(each) for each in model["merges"]])
    writer.add_add_space_prefix(False)
    writer.add_tensor("token_embd.weight", np.zeros((1, 1), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    backend, _, _ = gguf_tokenizer(tmp_path / "one.gguf")
    reader, _, _ = gguf_tokenizer(tmp_path / "one.gguf", encodes=False)
    assert reader.get_vocab() == backend.get_vocab()
    for text in (*CORPUS, "<|im_start|> a  b\n\n"):
        ids = source.encode(text, add_special_tokens=False).ids
        assert backend.encode(text, add_special_tokens=False).ids == ids
        assert backend.decode(ids) == source.decode(ids)
        assert reader.decode(ids, skip_special_tokens=False) == text
