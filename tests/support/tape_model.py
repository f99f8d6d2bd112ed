"""A model that plays a given text: each token depends only on the previous one.

The text is cut into tokens at arbitrary bytes, so that tokens split characters, joined emoji and
stop strings. So a whole server can be tested with exact answers.
"""

from __future__ import annotations

import codecs
import random
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.support.fake_checkpoint import expected_tensors, write_config
from tests.support.fake_engine import byte_alphabet
from tests.support.tiny_tokenizers import write_folder

NUM_BYTES = 256
HIDDEN_SIZE = 256


@dataclass(frozen=True)
class Tape:
    """The folder of a model that plays a text, and the bytes of its tokens.

    Attributes:
        pieces: bytes of the tokens `first_id`, `first_id + 1`, ...
    """

    folder: Path
    pieces: list[bytes]
    first_id: int = NUM_BYTES

    def output(self, start: int, count: int) -> str:
        """Return the text of `count` tokens after piece `start`, up to the last whole character."""
        data = b"".join(self.pieces[start + 1 : start + 1 + count])
        return codecs.getincrementaldecoder("utf-8")().decode(data)

    def is_border(self, index: int) -> bool:
        """Whether piece `index` begins with the first byte of a character."""
        return self.pieces[index][0] & 0xC0 != 0x80


def write_tape(folder: Path, text: str, seed: int = 0) -> Tape:
    """Write a model that plays `text`, cut into tokens at random bytes."""
    pieces = _cut(text.encode(), random.Random(seed))
    alphabet = byte_alphabet()
    names = [alphabet[byte] for byte in range(NUM_BYTES)]
    names += ["".join(alphabet[byte] for byte in piece) for piece in pieces]
    write_config(
        folder,
        vocab_size=len(names),
        hidden_size=HIDDEN_SIZE,
        max_position_embeddings=1024,
        torch_dtype="float32",
        tie_word_embeddings=False,
    )
    _write_weights(folder, len(names))
    vocab = {name: index for index, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    write_folder(folder, tokenizer)
    return Tape(folder, pieces)


def _cut(data: bytes, rng: random.Random) -> list[bytes]:
    """Cut data into different pieces of at least two bytes: a vocabulary has each string once."""
    pieces: list[bytes] = []
    begin = 0
    while begin < len(data):
        end = begin + rng.randint(2, 5)
        while data[begin:end] in pieces and end < len(data):
            end += 1
        if end - begin > 1 and len(data) - end > 1:
            pieces.append(data[begin:end])
        begin = end
    return pieces


def _write_weights(folder: Path, vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    embedding = torch.randn(vocab_size, HIDDEN_SIZE, generator=generator)
    tensors = {}
    for name, shape in expected_tensors(folder).items():
        if name.endswith("norm.weight"):
            tensors[name] = torch.ones(shape)
        elif name == "model.embed_tokens.weight":
            tensors[name] = embedding
        elif name == "lm_head.weight":
            # With these weights, each token is the most probable one after its predecessor.
            tensors[name] = embedding.roll(1, dims=0).contiguous()
        else:
            tensors[name] = torch.zeros(shape)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
