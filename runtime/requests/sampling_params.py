"""Sampling parameters of one request: the fields of the native API, checked once on arrival."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from operator import attrgetter
from typing import Annotated, Literal

import msgspec

from runtime.errors import InvalidRequest
from runtime.requests.bounds import at_most, within
from runtime.requests.stop_regex import InvalidPattern, compile_patterns

GREEDY_TEMPERATURE = 1e-6
MAX_STOP_STRINGS = 32
MAX_STOP_STRING_CHARS = 1024
MAX_SAMPLES = 128
INT64_MAX = 2**63 - 1

GrammarKind = Literal["json_schema", "regex", "ebnf", "structural_tag"]


class GrammarSpec(msgspec.Struct, frozen=True, gc=False):
    """A constraint on the output.

    Attributes:
        kind: the constraint's language, such as a JSON schema or a regular expression.
        text: the constraint, as the client wrote it.
        shows_special: whether special tokens count as their text, as they do in an output that
            shows them. If not, a grammar of plain text forbids them.
    """

    kind: GrammarKind
    text: str
    shows_special: bool = False


class ThinkingSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """How thoughts before the answer begin and end. A grammar does not apply to them.

    Attributes:
        open_ids: tokens that begin thoughts; empty if the output begins inside thoughts.
        lead_ids: tokens at the start of an answer without thoughts that the grammar does not cover;
            only with `open_ids`.
        end_ids: tokens that end thoughts, at least one.
        implied_ids: further tokens that end thoughts. Such a token belongs to the text after the
            thoughts. With a grammar, that text is `bridge_ids`, or the answer itself if the grammar
            allows the token at its start.
        bridge_ids: tokens between such an end and the answer. With a grammar they are forced.
        budget: most tokens of thoughts; `None` for no bound.
        forced_ids: tokens that are forced when the budget is used up; they include `end_ids`.
    """

    open_ids: list[int] = []
    lead_ids: list[int] = []
    end_ids: list[int]
    implied_ids: list[int] = []
    bridge_ids: list[int] = []
    budget: int | None = None
    forced_ids: list[int] = []


class ThoughtTexts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Texts that separate an output's thoughts from its answer.

    Attributes:
        is_open: whether the output begins inside thoughts.
        open: text that begins thoughts at the start of an output; empty if there is no such text.
        ends: texts that end thoughts. Neither the text nor the blanks after it belong to the
            answer.
        implied: further texts that end thoughts, but belong to the answer.
        headers: texts that begin a message's header, whose text belongs to no message. Empty if the
            output does not consist of messages.
        body: text that ends a header.
        thought: text whose presence in a header says that its message is a thought.
    """

    is_open: bool = False
    open: str = ""
    ends: list[str] = []
    implied: list[str] = []
    headers: list[str] = []
    body: str = ""
    thought: str = ""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Sampling and stopping of one request, already validated.

    Attributes:
        max_new_tokens: most tokens to generate; `None` means up to the context length.
        min_new_tokens: until this many tokens are generated, end-of-sequence and stop ids are
            masked, and stop strings and patterns are ignored.
        temperature: below `GREEDY_TEMPERATURE` the most likely token is taken.
        top_k: keep this many most likely tokens; -1 keeps all.
        seed: 64-bit seed; `None` draws one at admission.
        stop: texts that end the output; a text may extend over several tokens.
        stop_regex: patterns that end the output, in the syntax of `runtime.requests.stop_regex`.
        logit_bias: value to add to the logit of each token id.
        grammar: constraint on the output; `None` for an unconstrained output.
        thinking: thoughts before the answer, if the engine must handle them for a grammar or a
            budget; else `None`.
        thought_texts: set if stop strings and patterns apply to the answer only; `None` if they
            apply to thoughts too.
    """

    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: list[str] = []
    stop_regex: list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    seed: int | None = None
    logit_bias: dict[int, float] = {}
    n: int = 1
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    stream_interval: int | None = None
    grammar: GrammarSpec | None = None
    thinking: ThinkingSpec | None = None
    thought_texts: ThoughtTexts | None = None

    @property
    def is_greedy(self) -> bool:
        """Whether sampling always takes the most likely token."""
        return self.temperature < GREEDY_TEMPERATURE or self.top_k == 1

    @property
    def has_penalties(self) -> bool:
        """Whether generated tokens change later logits."""
        return (
            self.frequency_penalty != 0.0
            or self.presence_penalty != 0.0
            or self.repetition_penalty != 1.0
        )


@dataclass(frozen=True)
class _Rule:
    """Bounds of a number, and the text of its error message."""

    low: float
    high: float
    allowed: str
    is_open: bool = False

    def holds(self, value: float) -> bool:
        # NaN is refused too: all comparisons with it are false.
        return (self.low < value if self.is_open else self.low <= value) and value <= self.high

    @property
    def meta(self) -> msgspec.Meta:
        if self.is_open:
            return within(above=self.low, high=self.high)
        return within(self.low, self.high)


_RULES = {
    "temperature": _Rule(0.0, 1e6, "a finite number >= 0"),
    "top_p": _Rule(0.0, 1.0, "in (0, 1]", is_open=True),
    "min_p": _Rule(0.0, 1.0, "in [0, 1]"),
    "frequency_penalty": _Rule(-2.0, 2.0, "in [-2, 2]"),
    "presence_penalty": _Rule(-2.0, 2.0, "in [-2, 2]"),
    "repetition_penalty": _Rule(0.0, 2.0, "in (0, 2]", is_open=True),
}
MAX_BIAS = 1e4

# Field types for request bodies. They only declare the bounds; `validate_sampling_params` checks.
Temperature = Annotated[float, _RULES["temperature"].meta]
TopP = Annotated[float, _RULES["top_p"].meta]
# OpenAI allows `top_p` 0, which keeps only the most likely token.
TopPOrZero = Annotated[float, within(0.0, 1.0)]
TopK = Annotated[int, msgspec.Meta(extra_json_schema={"minimum": -1, "not": {"const": 0}})]
# In some APIs `top_k` may be 0, which means off like -1.
TopKOrOff = Annotated[int, within(-1)]
MinP = Annotated[float, _RULES["min_p"].meta]
FrequencyPenalty = Annotated[float, _RULES["frequency_penalty"].meta]
PresencePenalty = Annotated[float, _RULES["presence_penalty"].meta]
RepetitionPenalty = Annotated[float, _RULES["repetition_penalty"].meta]
NumSamples = Annotated[int, within(1, MAX_SAMPLES)]
NumTokens = Annotated[int, within(0, INT64_MAX)]
Int64 = Annotated[int, within(-INT64_MAX - 1, INT64_MAX)]
Bias = Annotated[float, within(-MAX_BIAS, MAX_BIAS)]
StopString = Annotated[str, at_most(chars=MAX_STOP_STRING_CHARS)]
StopStrings = Annotated[list[StopString], at_most(MAX_STOP_STRINGS)]
TokenId = Annotated[int, within(0)]


def check_priority(priority: int | None) -> int:
    """Return the priority of a request, 0 if it has none.

    Raises:
        InvalidRequest: the number needs more than 64 bits.
    """
    if priority is not None and not -INT64_MAX - 1 <= priority <= INT64_MAX:
        raise InvalidRequest("priority must fit in 64 bits.", param="priority")
    return priority or 0


def validate_sampling_params(params: SamplingParams, vocab_size: int) -> None:
    """Check every parameter against its bounds, and token ids against `vocab_size`.

    Raises:
        InvalidRequest: the first parameter out of bounds; the message says what is allowed.
    """
    for name, rule in _RULES.items():
        value = getattr(params, name)
        if not rule.holds(value):
            raise InvalidRequest(f"{name} must be {rule.allowed}, got {value}.", param=name)
    if params.top_k != -1 and params.top_k < 1:
        raise InvalidRequest(
            f"top_k must be -1 (disable) or at least 1, got {params.top_k}.", param="top_k"
        )
    if not 1 <= params.n <= MAX_SAMPLES:
        raise InvalidRequest(f"n must be in [1, {MAX_SAMPLES}], got {params.n}.", param="n")
    _check_lengths(params)
    _check_stop(params)
    if params.seed is not None and not -INT64_MAX - 1 <= params.seed <= INT64_MAX:
        raise InvalidRequest("sampling_seed must fit in 64 bits.", param="sampling_seed")
    for token_id in params.stop_token_ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                f"stop_token_ids must be in [0, {vocab_size}), got {token_id}.",
                param="stop_token_ids",
            )
    for token_id, bias in params.logit_bias.items():
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                f"logit_bias keys must be token ids in [0, {vocab_size}), got {token_id}.",
                param="logit_bias",
            )
        if not math.isfinite(bias) or abs(bias) > MAX_BIAS:
            raise InvalidRequest(
                f"logit_bias values must be within [-10000, 10000], got {bias}.",
                param="logit_bias",
            )


def _check_lengths(params: SamplingParams) -> None:
    limit = params.max_new_tokens
    if limit is not None and not 0 <= limit <= INT64_MAX:
        bound = "be at least 0" if limit < 0 else "fit in 64 bits"
        raise InvalidRequest(f"max_new_tokens must {bound}, got {limit}.", param="max_new_tokens")
    if not 0 <= params.min_new_tokens <= INT64_MAX:
        bound = "be at least 0" if params.min_new_tokens < 0 else "fit in 64 bits"
        raise InvalidRequest(
            f"min_new_tokens must {bound}, got {params.min_new_tokens}.", param="min_new_tokens"
        )
    if limit is not None and params.min_new_tokens > limit:
        raise InvalidRequest(
            f"min_new_tokens must be in [0, max_new_tokens({limit})], got {params.min_new_tokens}.",
            param="min_new_tokens",
        )
    interval = params.stream_interval
    if interval is not None and not 1 <= interval <= INT64_MAX:
        raise InvalidRequest(
            f"stream_interval must be at least 1, got {interval}.", param="stream_interval"
        )


def _check_stop(params: SamplingParams) -> None:
    if len(params.stop) > MAX_STOP_STRINGS:
        raise InvalidRequest(
            f"At most {MAX_STOP_STRINGS} stop strings are allowed, got {len(params.stop)}.",
            param="stop",
        )
    if any(len(text) > MAX_STOP_STRING_CHARS for text in params.stop):
        raise InvalidRequest(
            f"A stop string may have at most {MAX_STOP_STRING_CHARS} characters.", param="stop"
        )
    if params.stop_regex:
        try:
            compile_patterns(tuple(params.stop_regex))
        except InvalidPattern as error:
            raise InvalidRequest(f"stop_regex: {error}.", param="stop_regex") from None


class SamplingFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The JSON object `sampling_params`: every key is optional, and null means the default."""

    max_new_tokens: NumTokens | msgspec.UnsetType | None = msgspec.UNSET
    min_new_tokens: NumTokens | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    frequency_penalty: FrequencyPenalty | None = None
    presence_penalty: PresencePenalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    stop: StopString | StopStrings | None = None
    stop_token_ids: list[TokenId] | None = None
    stop_regex: str | list[str] | None = None
    ignore_eos: bool | None = None
    sampling_seed: Int64 | None = None
    logit_bias: dict[str, Bias] | None = None
    n: NumSamples | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    stream_interval: Annotated[int, within(1, INT64_MAX)] | None = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    # Parameters of SGLang's logit processors, which this server does not have. They are ignored.
    custom_params: dict[str, object] | None = None
    beam_width: int | None = None
    watermark: object | None = None


GRAMMAR_KINDS: tuple[GrammarKind, ...] = ("json_schema", "regex", "ebnf", "structural_tag")
# Fields of features that this server lacks: a neutral value passes, any other is refused.
_UNSUPPORTED = (
    "beam_width",
    "watermark",
)
_SIMPLE = (
    "min_new_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "stop_token_ids",
    "ignore_eos",
    "n",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "no_stop_trim",
    "stream_interval",
)
_simple = attrgetter(*_SIMPLE)
_TOKEN_ID = re.compile(r"-?[0-9]{1,10}")


def resolve_sampling(
    fields: SamplingFields, defaults: dict[str, object], vocab_size: int
) -> SamplingParams:
    """Turn the request's fields into checked parameters.

    Args:
        fields: the fields as decoded from the request.
        defaults: values for keys that the request omits (`max_new_tokens`, `temperature`, ...).
        vocab_size: number of logits of a token; token ids must be smaller.

    Raises:
        InvalidRequest: a value is out of bounds, or requests a feature that this server lacks.
    """
    for name in _UNSUPPORTED:
        if getattr(fields, name):
            raise InvalidRequest(f"{name} is not supported by this server yet.", param=name)
    simple = zip(_SIMPLE, _simple(fields), strict=True)
    values: dict[str, object] = {
        **defaults,
        **{name: value for name, value in simple if value is not None},
    }
    if fields.top_k is not None and fields.top_k > vocab_size:
        # A `top_k` of the vocabulary's size keeps all tokens too, and fits the worker's integers.
        values["top_k"] = vocab_size
    if fields.max_new_tokens is not msgspec.UNSET:
        values["max_new_tokens"] = fields.max_new_tokens
    if fields.sampling_seed is not None:
        values["seed"] = fields.sampling_seed
    if fields.stop is not None:
        texts = [fields.stop] if isinstance(fields.stop, str) else fields.stop
        values["stop"] = [text for text in texts if text]
    if fields.stop_regex:
        given = fields.stop_regex
        patterns = [given] if isinstance(given, str) else given
        values["stop_regex"] = [pattern for pattern in patterns if pattern]
    if fields.logit_bias:
        values["logit_bias"] = parse_logit_bias(fields.logit_bias)
    grammar = grammar_of(fields)
    if grammar is not None:
        values["grammar"] = grammar
    params = SamplingParams(**values)  # type: ignore[arg-type]  # keys are field names by construction
    validate_sampling_params(params, vocab_size)
    return params


def nth_sample(params: SamplingParams, index: int) -> SamplingParams:
    """Return the parameters of sample number `index`, from 0, of a request with `n` samples."""
    if params.n == 1:
        return params
    seed = params.seed
    if seed is not None:
        # With the same seed all samples would be equal.
        seed = (seed + index) % INT64_MAX
    return msgspec.structs.replace(params, n=1, seed=seed)


def grammar_of(fields: SamplingFields) -> GrammarSpec | None:
    """Return the request's constraint; `None` if it has none, or only an empty text.

    Raises:
        InvalidRequest: the request has more than one constraint.
    """
    given = [GrammarSpec(kind, text) for kind in GRAMMAR_KINDS if (text := getattr(fields, kind))]
    if len(given) > 1:
        names = " and ".join(each.kind for each in given)
        raise InvalidRequest(f"Only one constraint is allowed, got {names}.", param=given[1].kind)
    return given[0] if given else None


def parse_logit_bias(bias: dict[str, float]) -> dict[int, float]:
    """Turn the keys of a `logit_bias`, which are texts in JSON, into token ids.

    Raises:
        InvalidRequest: a key is not an integer.
    """
    parsed: dict[int, float] = {}
    for key, value in bias.items():
        if not _TOKEN_ID.fullmatch(key):
            raise InvalidRequest(
                f"logit_bias keys must be token ids, got {key[:32]!r}.", param="logit_bias"
            )
        parsed[int(key)] = value
    return parsed
