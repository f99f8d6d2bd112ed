"""Train the byte-level BPE tokenizer on the generated text."""

from collections.abc import Iterator
from itertools import islice
from random import Random
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from recipes.demo_model.encode import END_OF_TEXT, END_OF_TURN, segments_of
from recipes.demo_model.tasks import samples

SPECIAL = (END_OF_TEXT, "<|im_start|>", END_OF_TURN)
MARKERS = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>",
)  # fmt: skip
"""Added tokens that stay visible when special tokens are skipped, as in Qwen3."""

# Qwen's split: words with their leading space, single digits, runs of punctuation, line breaks.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def corpus(seed: int, count: int) -> Iterator[str]:
    """Rendered samples without the markers, which are separate tokens."""
    rng = Random(seed)
    for sample in islice(samples(seed), count):
        text = "".join(piece for piece, _ in segments_of(sample, rng))
        for marker in (*SPECIAL, *MARKERS):
            text = text.replace(marker, "\n")
        yield text


def train_tokenizer(vocab_size: int, seed: int = 0, count: int = 60_000) -> Tokenizer:
    """A tokenizer of exactly `vocab_size` ids that can write any Unicode text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    extra = len(SPECIAL) + len(MARKERS)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - extra,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        min_frequency=2,
    )
    tokenizer.train_from_iterator(corpus(seed, count), trainer)
    # A corpus too small for the vocabulary leaves ids unused; the model keeps rows for them.
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKERS])
    return tokenizer


def tokenizer_config(chat_template: str, max_len: int) -> dict[str, Any]:
    """What `transformers` needs beside `tokenizer.json`."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_len,
        "bos_token": None,
        "eos_token": END_OF_TURN,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": False,
        "chat_template": chat_template,
    }
