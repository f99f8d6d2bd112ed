"""A small cross-encoder and a small reward model, trained here within seconds on a CPU.

`python -m tests.support.trained_heads rerank FOLDER` (or `reward`) writes one of them. Texts are
words of a few topics. A document answers a query if both have the same topic; a reply is good if it
has the topic of its question. The models learn this from pairs, and are tested with other pairs.
"""

from __future__ import annotations

import json
import random
import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.support.tiny_models import tiny_root

TOPICS = {
    "mill": ["miller", "wheel", "grain", "flour", "sack"],
    "sea": ["ship", "sail", "harbour", "wave", "anchor"],
    "sky": ["star", "moon", "comet", "planet", "orbit"],
    "forest": ["tree", "moss", "deer", "fern", "owl"],
}
COMMON = ["what", "is", "the", "a", "of", "and", "does", "in", "it"]
_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
WORDS = [*_SPECIAL, *COMMON, *(word for words in TOPICS.values() for word in words)]
_SIZES: dict[str, Any] = {
    "vocab_size": len(WORDS),
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_NUM_STEPS, _BATCH = 320, 32
# A chat template that joins the two texts of a pair in one line.
_TEMPLATE = "{% for message in messages %}{{ message['content'] }} [SEP] {% endfor %}"


def text_of(topic: str, chance: random.Random) -> str:
    """Return two random words of a topic and one common word, in random order."""
    words = chance.sample(TOPICS[topic], 2) + chance.sample(COMMON, 1)
    chance.shuffle(words)
    return " ".join(words)


def pair_of(chance: random.Random, *, fits: bool) -> tuple[str, str]:
    """Return two random texts, of the same topic if `fits`, else of different topics."""
    first, other = chance.sample(list(TOPICS), 2)
    return text_of(first, chance), text_of(first if fits else other, chance)


@cache
def trained(kind: str) -> Path:
    """Return the folder of the `rerank` or `reward` model, trained on first use."""
    folder = tiny_root() / f"trained-{kind}"
    train(kind, folder)
    return folder


def train(kind: str, folder: Path) -> None:
    """Train a model and write its folder."""
    threads = torch.get_num_threads()
    # Matrices this small are multiplied more slowly by several threads.
    torch.set_num_threads(1)
    try:
        # Gradients are enabled, because an engine in this process may have disabled them.
        with torch.random.fork_rng(), torch.enable_grad():
            torch.manual_seed(5)
            _train(kind, folder)
    finally:
        torch.set_num_threads(threads)


def _train(kind: str, folder: Path) -> None:
    from transformers import (
        BertConfig,
        BertForSequenceClassification,
        LlamaConfig,
        LlamaForSequenceClassification,
    )

    # There are two key heads, so that two ranks can share the model.
    model = (
        BertForSequenceClassification(BertConfig(**_SIZES, **_NO_DROPOUT, num_labels=1))
        if kind == "rerank"
        else LlamaForSequenceClassification(
            LlamaConfig(**_SIZES, num_key_value_heads=2, head_dim=8, num_labels=1)
        )
    )
    chance = random.Random(7)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    for _ in range(_NUM_STEPS):
        scores = []
        for fits in (True, False):
            pairs = [pair_of(chance, fits=fits) for _ in range(_BATCH)]
            scores.append(model(**_inputs(kind, pairs)).logits[:, 0])
        # The loss compares two replies, as is usual for reward models (Bradley and Terry). It also
        # scores each reply alone.
        good, bad = scores
        sign = torch.nn.functional.logsigmoid
        loss = -(sign(good - bad) + sign(good) + sign(-bad)).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval().save_pretrained(folder)
    _write_tokenizer(kind, folder)


def _inputs(kind: str, pairs: list[tuple[str, str]]) -> dict[str, Tensor]:
    """Return the model's inputs; all pairs have the same length, so nothing is padded."""
    separator = WORDS.index("[SEP]")
    rows, types = [], []
    for pair in pairs:
        first, second = ([*map(WORDS.index, text.split()), separator] for text in pair)
        head = [WORDS.index("[CLS]")] if kind == "rerank" else []
        rows.append([*head, *first, *second])
        types.append([0] * (len(head) + len(first)) + [1] * len(second))
    found = {"input_ids": torch.tensor(rows)}
    return {**found, "token_type_ids": torch.tensor(types)} if kind == "rerank" else found


def _write_tokenizer(kind: str, folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    ids = {word: index for index, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(_SPECIAL)
    if kind == "rerank":
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[(token, ids[token]) for token in ("[CLS]", "[SEP]")],
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
    }
    if kind == "rerank":
        # The special tokens are those of BERT's own tokenizer.
        config["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
    else:
        config["chat_template"] = _TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    train(sys.argv[1], Path(sys.argv[2]))
