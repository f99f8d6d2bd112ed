"""Makes the tokenizer of a GGUF file, equal to the source model's `tokenizer.json`. No torch.

There are two kinds. Byte-level BPE (`gpt2`) has merges, and the file has only the name of its
pre-tokenizer. SentencePiece BPE (`llama`) has pieces with scores, and no merges.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from runtime.checkpoint.gguf.files import open_gguf
from runtime.checkpoint.gguf.header import GgufArray
from runtime.errors import StartupError

# Kinds of tokens, as GGUF files number them.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_NAMED = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
_SPACE = "\u2581"

# Regular expressions of pre-tokenizers, which split a text into words. Source:
# `convert_hf_to_gguf_update.py` and `llama-vocab.cpp` of llama.cpp, and the `tokenizer.json` of the
# models after which the pre-tokenizers are named.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    rf"|{_CASED_REST}"
)
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_CASED_REST}"
)
_NOT_HAN = r"&&[^\p{Han}]"
_UPPER_NOT_HAN, _LOWER_NOT_HAN = f"[{_UPPER}{_NOT_HAN}]", f"[{_LOWER}{_NOT_HAN}]"
_KIMI = (
    rf"\p{{Han}}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER_NOT_HAN}*{_LOWER_NOT_HAN}+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER_NOT_HAN}+{_LOWER_NOT_HAN}*{_CONTRACTIONS}?|\p{{N}}{{1,3}}"
    rf"|{_REST}"
)
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
_SEED = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
# Letters that have a case, as the `tokenizer.json` of DeepSeek LLM lists them.
_CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-"
    "\u02af\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1"
    "\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-"
    "\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15"
    "\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d"
    "\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d"
    "\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183"
    "\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b"
    "\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-"
    "\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb"
    "\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_CASED}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    _CJK,
    r"\p{N}+",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
# The splitting expressions of each pre-tokenizer, by name. Several are applied one after the other.
# The names in `_DIGITS` and `_PLAIN` have other steps.
SPLITS: dict[str, str | tuple[str, ...]] = {
    "llama-bpe": _LLAMA3, "llama3": _LLAMA3, "llama-v3": _LLAMA3, "falcon3": _LLAMA3,
    "smaug-bpe": _LLAMA3, "dbrx": _LLAMA3, "lfm2": _LLAMA3, "midm-2.0": _LLAMA3,
    "qwen2": _QWEN2, "deepseek-r1-qwen": _QWEN2, "stablelm2": _QWEN2, "megrez": _QWEN2,
    "hunyuan": _QWEN2, "solar-open": _QWEN2,
    "glm4": _LLAMA3, "chatglm-bpe": _LLAMA3, "kormo": _QWEN2, "grok-2": _QWEN2,
    "tekken": _TEKKEN, "gpt-4o": _GPT4O, "llama4": _GPT4O, "minimax-m2": _GPT4O,
    "deepseek-llm": _DEEPSEEK_LLM, "deepseek-coder": _DEEPSEEK_CODER,
    "deepseek-v3": _DEEPSEEK_V3, "hunyuan-dense": _DEEPSEEK_V3, "kimi-k2": _KIMI,
    "bailingmoe": _BAILING, "bailingmoe2": _BAILING, "llada-moe": _BAILING, "seed-coder": _SEED,
}  # fmt: skip
_DIGITS = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"})
_PLAIN = frozenset(
    {
        *("gpt-2", "gpt2", "phi-2", "olmo", "jais", "mpt", "default"),
        *("exaone4", "mellum", "a.x-4.0", "gigachat"),
    }
)
# Pre-tokenizers whose tokenizers compose accents (NFC) first.
_NFC = frozenset({"qwen2", "deepseek-r1-qwen", "command-r", "megrez", "olmo", "mpt"})
# Pre-tokenizers with this rule: a word that is itself a token becomes that token, without merges.
_WHOLE_WORDS = frozenset({"llama-bpe", "llama3", "llama-v3", "tekken", "falcon3"})
# Pre-tokenizers whose sequences begin with a BOS token if the file does not say otherwise.
_BEGIN_BY_DEFAULT = frozenset({"llama-bpe", "llama3", "llama-v3", "tekken", "falcon3"})


def gguf_tokenizer(
    path: Path, *, encodes: bool = True
) -> tuple[Backend, dict[str, Any], str | None]:
    """Make the tokenizer of the `tokenizers` library from a GGUF file's metadata.

    Args:
        path: the file.
        encodes: whether text will be encoded. Otherwise the tokenizer has no merges, which saves
            half of its memory and of the time to make it.

    Returns:
        The tokenizer, the content that its `tokenizer_config.json` would have, and the chat
        template; `None` if there is none.

    Raises:
        StartupError: the file has no vocabulary, or one of an unknown kind; the message has one
            line.
    """
    file = open_gguf(path)
    words = _Words(str(file.path), file.metadata)
    kind = words.text("model")
    if kind == "gpt2":
        backend = _byte_level(words, words.merges() if encodes else [])
    elif kind == "llama":
        backend = _sentence_pieces(words, _merges(words) if encodes else [])
    elif kind == "gemma4":
        # SentencePiece's spaces and bytes, with the merges in the file.
        backend = _sentence_pieces(words, words.merges() if encodes else [])
    else:
        known = "gpt2 (byte-level BPE), llama (SentencePiece), gemma4 (this with merges)"
        raise words.error(f"its tokenizer is of the kind {kind!r}; {known} are read")
    config = _config(words)
    template = file.metadata.get("tokenizer.chat_template")
    return backend, config, template if isinstance(template, str) else None


class _Words:
    """The tokenizer's part of a GGUF file's metadata."""

    def __init__(self, source: str, metadata: dict[str, Any]) -> None:
        self._source, self._metadata = source, metadata
        self.tokens: list[str] = self._array("tokens", texts=True) or []
        if not self.tokens:
            raise self.error("it has no vocabulary ('tokenizer.ggml.tokens')")
        self.kinds: list[int] = self._array("token_type") or [_NORMAL] * len(self.tokens)
        if len(self.kinds) != len(self.tokens):
            raise self.error(f"{len(self.tokens)} tokens and {len(self.kinds)} kinds of them")
        self.pre = self._metadata.get("tokenizer.ggml.pre", "default")

    def error(self, what: str) -> StartupError:
        return StartupError(
            f"{self._source}: {what}; --tokenizer-path may name a folder with a tokenizer.json"
        )

    def text(self, key: str) -> str:
        value = self._metadata.get(f"tokenizer.ggml.{key}")
        return value if isinstance(value, str) else "none"

    def flag(self, key: str, default: bool) -> bool:
        value = self._metadata.get(f"tokenizer.ggml.{key}")
        return value if isinstance(value, bool) else default

    def token(self, key: str) -> str | None:
        value = self._metadata.get(f"tokenizer.ggml.{key}")
        if not isinstance(value, int) or not 0 <= value < len(self.tokens):
            return None
        return self.tokens[value]

    def merges(self) -> list[tuple[str, str]]:
        merges: list[tuple[str, str]] = []
        for line in self._array("merges", texts=True) or []:
            left, space, right = line.partition(" ")
            if not space:
                raise self.error(f"{line[:32]!r} is not two parts of a merge")
            merges.append((left, right))
        return merges

    def scores(self) -> list[float]:
        scores = self._array("scores") or []
        if len(scores) != len(self.tokens):
            raise self.error(f"{len(self.tokens)} tokens and {len(scores)} scores of them")
        return scores

    def _array(self, key: str, *, texts: bool = False) -> list[Any] | None:
        value = self._metadata.get(f"tokenizer.ggml.{key}")
        if value is None:
            return None
        try:
            if not isinstance(value, GgufArray):
                raise ValueError("not an array")
            return value.texts() if texts else value.numbers()
        except ValueError as error:
            raise self.error(f"'tokenizer.ggml.{key}': {error}") from error

    def vocabulary(self) -> dict[str, int]:
        vocabulary = {token: token_id for token_id, token in enumerate(self.tokens)}
        if len(vocabulary) != len(self.tokens):
            raise self.error("a token comes twice in its vocabulary")
        return vocabulary

    def added(self) -> list[AddedToken]:
        """Return the tokens that are found in a text before it is split, sorted by id."""
        return [
            AddedToken(token, special=kind == _CONTROL, normalized=False)
            for token, kind in zip(self.tokens, self.kinds, strict=True)
            if kind in (_CONTROL, _USER_DEFINED) and token
        ]


def _config(words: _Words) -> dict[str, Any]:
    config: dict[str, Any] = {name: words.token(key) for name, key in _NAMED.items()}
    begins = words.text("model") == "llama" or words.pre in _BEGIN_BY_DEFAULT
    config["add_bos_token"] = words.flag("add_bos_token", begins)
    config["add_eos_token"] = words.flag("add_eos_token", False)
    config["clean_up_tokenization_spaces"] = False
    return config


def _made(words: _Words, model: BPE) -> Backend:
    backend = Backend(model)
    backend.add_tokens(words.added())
    return backend


def _byte_level(words: _Words, merges: list[tuple[str, str]]) -> Backend:
    pre = words.pre
    steps: list[Any]
    if pre in SPLITS:
        split = SPLITS[pre]
        parts = (split,) if isinstance(split, str) else split
        steps = [pre_tokenizers.Split(Regex(part), "isolated") for part in parts]
        uses_regex = False
    elif pre in _DIGITS:
        steps, uses_regex = [pre_tokenizers.Digits(individual_digits=True)], True
    elif pre in _PLAIN:
        steps, uses_regex = [], True
    else:
        known = ", ".join(sorted({*SPLITS, *_DIGITS, *_PLAIN}))
        raise words.error(f"its pre-tokenizer {pre!r} is not known; these are: {known}")
    begins_with_space = words.flag("add_space_prefix", False)
    level = pre_tokenizers.ByteLevel(add_prefix_space=begins_with_space, use_regex=uses_regex)
    try:
        model = BPE(
            vocab=words.vocabulary(),
            merges=merges,
            ignore_merges=pre in _WHOLE_WORDS,
        )
    except Exception as error:  # The library raises bare Exception.
        raise words.error(f"its merges do not fit its vocabulary: {error}") from error
    backend = _made(words, model)
    if pre in _NFC:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence([*steps, level]) if steps else level
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentence_pieces(words: _Words, merges: list[tuple[str, str]]) -> Backend:
    unknown = words.token("unknown_token_id")
    try:
        model = BPE(
            vocab=words.vocabulary(),
            merges=merges,
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=_BYTE in words.kinds,
        )
    except Exception as error:  # The library raises bare Exception.
        raise words.error(f"its merges do not fit its vocabulary: {error}") from error
    backend = _made(words, model)
    replaced = normalizers.Replace(" ", _SPACE)
    prefix = words.flag("add_space_prefix", True)
    backend.normalizer = (
        normalizers.Sequence([normalizers.Prepend(_SPACE), replaced]) if prefix else replaced
    )
    steps: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend


def _merges(words: _Words) -> list[tuple[str, str]]:
    """Return the merges: every pair of pieces that join to a third piece, best third piece first.

    SentencePiece joins the two neighbors whose joined piece has the best score. Merges in the order
    of these scores have the same effect. Pieces with equal scores are in the order of
    `transformers`.

    A quarter of a million pieces can be cut at two million positions. So their parts are compared
    by hashes, in arrays, and only the matches are compared as texts.
    """
    # Imported here, because only models with such a tokenizer need it.
    import numpy as np

    tokens = words.tokens
    can_be_joined = np.isin(np.array(words.kinds), (_NORMAL, _USER_DEFINED, _UNUSED))
    lengths = np.array([len(token) for token in tokens])
    ends = np.cumsum(lengths)
    text = "".join(tokens).encode("utf-32-le", errors="surrogatepass")
    hashes = _Hashes(np.frombuffer(text, dtype=np.uint32))
    known = np.flatnonzero(can_be_joined & (lengths > 0))
    of_known = hashes.between(ends[known] - lengths[known], ends[known])
    order = np.argsort(of_known)
    of_known, known = of_known[order], known[order]

    def find(first: Any, last: Any) -> Any:
        """Return the ids of the pieces that equal the given parts of `text`; -1 for no piece."""
        wanted = hashes.between(first, last)
        places = np.minimum(np.searchsorted(of_known, wanted), len(known) - 1)
        return np.where(of_known[places] == wanted, known[places], -1)

    if not len(known):
        return []
    joined = np.flatnonzero(can_be_joined & (lengths > 1))
    scores = np.array(words.scores(), dtype=np.float64)
    joined = joined[np.lexsort((joined, -scores[joined]))]
    counts = lengths[joined] - 1
    places = np.repeat(np.arange(len(joined)), counts)
    starts, stops = (ends - lengths)[joined][places], ends[joined][places]
    cuts = starts + 1 + np.arange(len(places)) - np.repeat(np.cumsum(counts) - counts, counts)
    left = find(starts, cuts)
    places, cuts, stops, left = (each[left >= 0] for each in (places, cuts, stops, left))
    right = find(cuts, stops)
    places, left, right = (each[right >= 0] for each in (places, left, right))
    # A merged piece's left part determines the right one, so sorting by the left one is enough.
    order = np.argsort(places * len(tokens) + left)
    texts = tokens.__getitem__
    return list(
        zip(map(texts, left[order].tolist()), map(texts, right[order].tolist()), strict=True)
    )


class _Hashes:
    """Hashes of all substrings of a text: sums of characters times powers of an odd number."""

    _BASE = 0x9E37_79B9_7F4A_7C15

    def __init__(self, characters: Any) -> None:
        import numpy as np

        mixed = characters.astype(np.uint64) * np.uint64(0xBF58_476D_1CE4_E5B9) + np.uint64(1)
        mixed ^= mixed >> np.uint64(29)
        factors = np.full(len(characters) + 1, self._BASE, dtype=np.uint64)
        inverses = np.full(len(factors), pow(self._BASE, -1, 2**64), dtype=np.uint64)
        factors[0] = inverses[0] = 1
        summed = np.cumsum(mixed * np.cumprod(factors)[:-1])
        self._sums = np.concatenate([np.zeros(1, np.uint64), summed])
        self._inverses = np.cumprod(inverses)

    def between(self, first: Any, last: Any) -> Any:
        """Return the hashes of the substrings from `first` up to `last`.

        Equal substrings have equal hashes, wherever they are.
        """
        return (self._sums[last] - self._sums[first]) * self._inverses[first]
