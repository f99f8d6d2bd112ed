"""Tiny tokenizers of the common kinds, trained in the tests on a few lines of text."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

CORPUS = [
    "The quick brown fox jumps over the lazy dog, doesn't it? It's 12345 o'clock!",
    "Paris is the capital of France . Berlin is the capital of Germany .",
    "STOP here. Human: hello\n\nAssistant: hi there\n",
    "日本語の文章です。東京は日本の首都です。 中文字符测试。 한국어 문장.",
    "Привет, мир! مرحبا بالعالم שלום עולם",
    "😀😃 family 👨‍👩‍👧‍👦 flag 🇫🇷 é e\u0301 naïve café",
    "def f(x):\n    return x + 1  # comment\n\t<tag> [INST] {json: 1}",
]
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIALS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
PLAIN_ADDED = ["<think>", "<tool_call>"]


def _add_tokens(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIALS])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in PLAIN_ADDED])
    return tokenizer


def _bos_template(tokenizer: Tokenizer) -> processors.TemplateProcessing:
    return processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )


def gpt2() -> Tokenizer:
    """Return a byte-level BPE tokenizer that splits text as GPT-2 does."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=450,
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return _add_tokens(tokenizer)


def llama3() -> Tokenizer:
    """Return a byte-level BPE tokenizer with a split pattern and a BOS, as in Llama 3 and Qwen."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=450,
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    _add_tokens(tokenizer)
    tokenizer.post_processor = processors.Sequence(
        [processors.ByteLevel(trim_offsets=False), _bos_template(tokenizer)]
    )
    return tokenizer


def _byte_fallback_bpe() -> Tokenizer:
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    tokenizer.train_from_iterator(
        # Only Latin text is used, so that other scripts fall back to bytes.
        [line for line in CORPUS if line.isascii()],
        trainers.BpeTrainer(
            vocab_size=420,
            show_progress=False,
            special_tokens=["<unk>", "<s>", "</s>", *byte_tokens],
        ),
    )
    state = json.loads(tokenizer.to_str())
    # The trainer makes its special tokens added tokens. In Llama's files, the tokens of bytes are
    # normal vocabulary.
    state["added_tokens"] = [
        token for token in state["added_tokens"] if token["content"] not in byte_tokens
    ]
    return Tokenizer.from_str(json.dumps(state))


def llama2() -> Tokenizer:
    """Return a BPE tokenizer with byte fallback that prepends a space, as in Llama 2."""
    tokenizer = _byte_fallback_bpe()
    tokenizer.pre_tokenizer = None
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    _add_tokens(tokenizer)
    tokenizer.post_processor = _bos_template(tokenizer)
    return tokenizer


def mistral() -> Tokenizer:
    """Return a tokenizer as in Llama 2, but with a space before the first word only."""
    tokenizer = llama2()
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return tokenizer


def gemma() -> Tokenizer:
    """Return a BPE tokenizer with byte fallback that prepends no space, as in Gemma."""
    tokenizer = llama2()
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def unigram() -> Tokenizer:
    """Return a Unigram tokenizer with metaspace, as in T5 and XLM-RoBERTa."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.UnigramTrainer(
            vocab_size=400,
            show_progress=False,
            special_tokens=["<unk>", "<s>", "</s>"],
            unk_token="<unk>",
        ),
    )
    return _add_tokens(tokenizer)


def wordpiece() -> Tokenizer:
    """Return a WordPiece tokenizer, as in BERT."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.WordPieceTrainer(
            vocab_size=400,
            show_progress=False,
            special_tokens=["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"],
        ),
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        special_tokens=[(t, tokenizer.token_to_id(t)) for t in ("[CLS]", "[SEP]")],
    )
    return _add_tokens(tokenizer)


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "gpt2": gpt2,
    "llama3": llama3,
    "llama2": llama2,
    "mistral": mistral,
    "gemma": gemma,
    "unigram": unigram,
    "wordpiece": wordpiece,
}


def write_folder(folder: Path, tokenizer: Tokenizer, **config: Any) -> Path:
    """Save a tokenizer in a model's folder; `config` is for `tokenizer_config.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    content = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(content), encoding="utf-8")
    return folder
