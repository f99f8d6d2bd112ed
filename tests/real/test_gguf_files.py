"""Real GGUF files, where `python -m tools.real_models` has put them: `make test-real`."""

from __future__ import annotations

import time
from functools import cache
from itertools import pairwise
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from runtime.checkpoint.gguf.config import gguf_configs
from runtime.checkpoint.gguf.files import open_gguf
from runtime.checkpoint.headers import read_tensor_infos
from runtime.checkpoint.tensor_info import TensorInfo
from runtime.text.tokenizer import Tokenizer
from tests.support.driver import Driver, load
from tools.real_models import MODELS, path_of

DOCS = Path(__file__).parents[2] / "docs"
TYPES = {"smollm2": "llama", "gemma3": "gemma3_text", "qwen2.5-coder": "qwen2"}
# What rounding activations to 8 bits costs, see docs/gguf.md.
MOST_DIVERGENCE = {"smollm2": 0.006, "gemma3": 0.006, "qwen2.5-coder": 0.006}
# How the greedy answers to ten questions begin, as they are: the model is small.
QUESTIONS = {
    "What is the capital of Japan?": "The capital of Japan is Tokyo.",
    "What color is the sky on a clear day?": "The sky on a clear day is often described as",
    "How many days are in a week?": "A week is approximately 7 days.",
    "What is the opposite of hot?": "The opposite of hot is cold.",
    "Who wrote Romeo and Juliet?": "The story of Romeo and Juliet by William Shakespeare",
    "What is 2 * 2?": "2 * 2 = 4",
    "What do bees make?": "Bees are incredibly complex creatures",
    "What is water made of?": "Water is a fundamental element",
    "What language is spoken in Brazil?": "In Brazil, the official language is Portuguese",
    "What is the freezing point of water?": "The freezing point of water is",
}


@pytest.fixture(params=list(MODELS))
def name(request: pytest.FixtureRequest) -> str:
    found = str(request.param)
    if not path_of(found).is_file():
        pytest.skip(f"no {path_of(found)}: python -m tools.real_models {found}")
    return found


def numbers(info: TensorInfo) -> Tensor:
    """What the package makes of a tensor's bytes, in the order of the source's checkpoint."""
    data = np.fromfile(info.file, np.uint8, info.size_bytes, offset=info.start)
    stored = gguf.GGMLQuantizationType[info.dtype]
    block, block_bytes = gguf.GGML_QUANT_SIZES[stored]
    rows = data.reshape(-1, info.shape[-1] // block * block_bytes)
    values = torch.from_numpy(gguf.dequantize(rows, stored).copy()).view(info.shape)
    if info.interleaved_heads:
        pairs = values.unflatten(0, (info.interleaved_heads, -1, 2))
        values = pairs.transpose(1, 2).flatten(0, 2)
    return values - info.offset


@cache
def reference(name: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    config, _ = gguf_configs(path_of(name))
    others = {"architectures", "quantization_config", "dtype", "rope_theta"}
    values = {key: value for key, value in config.items() if key not in others}
    values["rope_theta"] = config["rope_theta"]
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(TYPES[name], **values), dtype=torch.float32
    )
    state = model.state_dict()
    for key, info in read_tensor_infos(path_of(name)).items():
        state[key].copy_(numbers(info))
    return model.eval()


def test_logits_are_those_of_the_numbers(name: str) -> None:
    tokenizer = Tokenizer.from_folder(path_of(name))
    # Not a page of ours: the figures would change with its words.
    ids = tokenizer.encode("\n\n".join(topics[each] for each in sorted(topics))[:2000])[:200]
    with torch.inference_mode():
        expected = reference(name)(torch.tensor([ids])).logits[0]
    driver = Driver(load(path_of(name)))
    found = driver.prefill(driver.start(ids))
    first, second = expected.log_softmax(-1), found.log_softmax(-1)
    divergence = float((first.exp() * (first - second)).sum(-1).mean())
    agreement = float((expected.argmax(-1) == found.argmax(-1)).float().mean())
    assert divergence < MOST_DIVERGENCE[name]
    assert agreement > 0.95


def test_tokenizer_is_quick_and_comes_back(name: str) -> None:
    open_gguf(path_of(name))
    started = time.process_time()
    tokenizer = Tokenizer.from_folder(path_of(name))
    assert time.process_time() - started < 4
    text = "Hello, world! 12345 it's\n\n  naïve 你好 🦊\tdef f(x):\n    return x ** 2\n"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_sentence_pieces_are_those_of_the_library() -> None:
    path = path_of("gemma3")
    if not path.is_file():
        pytest.skip("not fetched")
    library = pytest.importorskip("sentencepiece")
    pytest.importorskip("google.protobuf", reason="sentencepiece does not install it")
    from sentencepiece import sentencepiece_model_pb2 as proto

    metadata = open_gguf(path).metadata
    model = proto.ModelProto()
    model.trainer_spec.model_type = proto.TrainerSpec.BPE
    model.trainer_spec.byte_fallback = True
    model.trainer_spec.unk_id, model.trainer_spec.bos_id = 3, 2
    model.trainer_spec.eos_id, model.trainer_spec.pad_id = 1, 0
    model.normalizer_spec.name = "identity"
    model.normalizer_spec.add_dummy_prefix = False
    model.normalizer_spec.remove_extra_whitespaces = False
    listed = [metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "scores", "token_type")]
    texts, scores, kinds = listed[0].texts(), listed[1].numbers(), listed[2].numbers()
    for index, (piece, score, kind) in enumerate(zip(texts, scores, kinds, strict=True)):
        # The converter writes spaces where the source has its own character for them.
        text = piece.replace(" ", "\u2581") if kind == 4 else piece
        model.pieces.add(piece=text, score=score, type=2 if index == 3 else kind)
    theirs = library.SentencePieceProcessor(model_proto=model.SerializeToString())
    ours = Tokenizer.from_folder(path)
    pages = [*DOCS.rglob("*.md"), *DOCS.parent.glob("runtime/**/*.py")]
    lines = [
        line for page in sorted(pages) for line in page.read_text().split("\n") if line.strip()
    ]
    lines = lines[:: max(1, len(lines) // 2000)]
    lines += [
        "Größe, naïve, Ωμέγα, 你好世界, こんにちは, 안녕, עברית, العربية",
        "🦊🏔️ 👩‍👩‍👧",
        "\t\tx\n\n\n  y ",
    ]
    different = [
        line for line in lines if ours.encode(line, add_special_tokens=False) != theirs.encode(line)
    ]
    assert not different, (len(different), different[:5])


def merged(word: str, ranks: dict[tuple[str, str], int]) -> list[str]:
    """A word's pieces: the best pair is merged until none is known."""
    pieces = list(word)
    while True:
        pairs = [(ranks[pair], at) for at, pair in enumerate(pairwise(pieces)) if pair in ranks]
        if not pairs:
            return pieces
        _, at = min(pairs)
        pieces[at : at + 2] = ["".join(pieces[at : at + 2])]


def test_byte_pairs_are_those_of_the_textbook() -> None:
    """The source's steps: single digits, GPT-2's expression, bytes as letters, merges."""
    path = path_of("smollm2")
    if not path.is_file():
        pytest.skip("not fetched")
    regex = pytest.importorskip("regex")
    metadata = open_gguf(path).metadata
    tokens, lines = (metadata[f"tokenizer.ggml.{key}"].texts() for key in ("tokens", "merges"))
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    ranks = {tuple(line.split(" ")): rank for rank, line in enumerate(lines)}
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in printable}
    others = [byte for byte in range(256) if byte not in letters]
    letters |= {byte: chr(256 + at) for at, byte in enumerate(others)}
    digits = regex.compile(r"\p{N}|\P{N}+")
    words = regex.compile(
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    )
    ours = Tokenizer.from_folder(path)
    pages = sorted(DOCS.glob("*.md"))
    texts = [line for page in pages for line in page.read_text().split("\n") if line.strip()]
    texts = texts[:: max(1, len(texts) // 500)]
    texts += ["Größe, naïve, Ωμέγα, 你好世界, العربية", "🦊🏔️ 12345 it's\n\n  x\t\ty  "]
    for text in texts:
        expected = [
            ids[piece]
            for run in digits.findall(text)
            for word in words.findall(run)
            for piece in merged("".join(letters[byte] for byte in word.encode()), ranks)
        ]
        assert ours.encode(text, add_special_tokens=False) == expected, text


def test_answers() -> None:
    path = path_of("smollm2")
    if not path.is_file():
        pytest.skip("not fetched")
    tokenizer = Tokenizer.from_folder(path)
    assert tokenizer.chat_template is not None
    from jinja2 import Environment

    template = Environment().from_string(tokenizer.chat_template)
    driver = Driver(load(path), num_pages=512)
    for question, expected in QUESTIONS.items():
        messages = [{"role": "user", "content": question}]
        prompt = template.render(messages=messages, add_generation_prompt=True)
        sequence = driver.start(tokenizer.encode(prompt, add_special_tokens=False))
        start = len(sequence.tokens)
        driver.greedy([sequence], 16)
        answer = tokenizer.decode(sequence.tokens[start:])
        assert answer.startswith(expected), (question, answer)
