"""Compiles grammars in this process, and checks outputs by a grammar."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from runtime.client.grammar_client import grammar_key
from runtime.errors import InvalidRequest
from runtime.grammar.grammar_backend import (
    GRAMMAR_BACKENDS,
    GrammarBackend,
    GrammarError,
    num_words,
)
from runtime.grammar.libraries import GrammarLibraries, open_libraries
from runtime.grammar.limits import check_grammar
from runtime.requests.sampling_params import GrammarSpec
from runtime.text.tokenizer import Tokenizer
from tests.support.tiny_tokenizers import write_folder


class InProcessCompiler:
    """Does what a `GrammarCompiler` does, without another process.

    Attributes:
        specs: the grammars that were compiled.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        tokenizer: Tokenizer,
        eos_token_ids: list[int],
        *,
        alone: bool = False,
    ):
        """Set up the grammar libraries for a tokenizer.

        Args:
            name: name of the library that is tried first.
            folder: folder to which the tokenizer is written.
            tokenizer: a tokenizer with a token for each byte.
            eos_token_ids: token ids that end an output.
            alone: use only the library `name`.
        """
        write_folder(folder, tokenizer.backend)
        self.tokenizer = tokenizer
        self.eos_token_ids = eos_token_ids
        added = tokenizer.backend.get_added_tokens_decoder()
        self._spelled = {i: list(added[i].content.encode()) for i in set(added) - {*eos_token_ids}}
        made = tokenizer.vocab_size, eos_token_ids
        self.backend = (
            GrammarLibraries({name: GRAMMAR_BACKENDS.load(name)(folder, *made)})
            if alone
            else open_libraries(name, folder, *made)
        )
        self.specs: list[GrammarSpec] = []

    def compile(self, spec: GrammarSpec) -> tuple[bytes, asyncio.Future[bytes]]:
        """Compile a grammar; see `GrammarCompiler.compile`."""
        check_grammar(spec)
        self.specs.append(spec)
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        try:
            future.set_result(self.backend.compile(spec))
        except GrammarError as error:
            message = f"{spec.kind} cannot be used: {error}."
            future.set_exception(InvalidRequest(message, param=spec.kind))
        return grammar_key(spec), future

    def takes(self, payload: bytes, text: str) -> bool:
        """Whether a compiled grammar allows the whole output `text`.

        If a grammar allows the text of an added token, but not the token, the text is written as
        bytes. This happens in llguidance with bytes that two tags have in common.
        """
        ids = deque(
            [*self.tokenizer.encode(text, add_special_tokens=False), *self.eos_token_ids[:1]]
        )
        matcher = self.backend.start(self.backend.load(payload))
        while ids and not matcher.is_terminated:
            token_id = ids.popleft()
            if token_id in allowed(self.backend, matcher, self.tokenizer.vocab_size):
                # A library that refuses a token which it allowed would end outputs with an error.
                assert matcher.accept(token_id)
            elif token_id in self._spelled:
                ids.extendleft(reversed(self._spelled[token_id]))
            else:
                return False
        return not ids


def allowed(backend: GrammarBackend[Any], matcher: Any, vocab_size: int) -> list[int]:
    """Return the tokens that a grammar allows next."""
    words = np.zeros((1, num_words(vocab_size)), dtype=np.int32)
    backend.fill([matcher], words)
    bits = np.unpackbits(words[0].view(np.uint8), bitorder="little")[:vocab_size]
    return [int(token_id) for token_id in np.flatnonzero(bits)]


def drawn(compiler: InProcessCompiler, payload: bytes, seed: int, heads: Sequence[str] = ()) -> str:
    """Return an output of random tokens that a compiled grammar allows.

    Whenever the output may end, the next text of `heads` is appended. After the last one the output
    ends.
    """
    waiting = deque(heads)
    rng, tokenizer = random.Random(seed), compiler.tokenizer
    matcher = compiler.backend.start(compiler.backend.load(payload))
    ids: list[int] = []
    while not matcher.is_terminated:
        choices = allowed(compiler.backend, matcher, tokenizer.vocab_size)
        token_ids = [rng.choice(choices)]
        if not set(compiler.eos_token_ids).isdisjoint(choices):
            token_ids = compiler.eos_token_ids[:1]
            if waiting:
                token_ids = tokenizer.encode(waiting.popleft())
        for token_id in token_ids:
            ids.append(token_id)
            assert matcher.accept(token_id), tokenizer.decode(ids, skip_special_tokens=False)
    return str(tokenizer.decode(ids[:-1], skip_special_tokens=False))
