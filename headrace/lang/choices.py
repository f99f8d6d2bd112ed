"""The methods by which `select` decides from log-probabilities, and their protocol."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Entry = Sequence[Any]
"""A token's [logprob, token_id, text]; a logprob may be None."""


@dataclass
class ChoicesDecision:
    """The text that was chosen, and the numbers from which it was chosen."""

    decision: str
    meta_info: dict[str, Any]


class ChoicesSamplingMethod(Protocol):
    """Decides between texts by their log-probabilities; users may write their own."""

    @property
    def requires_unconditional_logprobs(self) -> bool:
        """Whether the method needs log-probabilities of the choices without the prompt too."""

    def __call__(
        self,
        *,
        choices: list[str],
        normalized_prompt_logprobs: list[float],
        input_token_logprobs: list[list[Entry]],
        output_token_logprobs: list[list[Entry]],
        unconditional_token_logprobs: list[list[Entry]] | None = None,
    ) -> ChoicesDecision:
        """Choose one of the texts.

        An entry is a triple of log-probability, token id and text of a token.

        Args:
            choices: the texts.
            normalized_prompt_logprobs: for each choice, the mean log-probability of its tokens.
            input_token_logprobs: for each choice, the entries of its tokens.
            output_token_logprobs: for each choice, the entries of generated tokens; mostly empty.
            unconditional_token_logprobs: for each choice, the entries of its tokens, scored without
                the prompt.
        """


def mean_logprob(entries: Sequence[Entry]) -> float:
    """Return the mean of the entries' log-probabilities; None is left out, and no entry gives 0."""
    values = [entry[0] for entry in entries if entry[0] is not None]
    return sum(values) / len(values) if values else 0.0


def _first_best(scores: Sequence[float]) -> int:
    return max(range(len(scores)), key=scores.__getitem__)


class TokenLengthNormalized:
    """Chooses the text with the greatest mean log-probability per token; if equal, the first."""

    requires_unconditional_logprobs = False

    def __call__(
        self,
        *,
        choices: list[str],
        normalized_prompt_logprobs: list[float],
        input_token_logprobs: list[list[Entry]],
        output_token_logprobs: list[list[Entry]],
        unconditional_token_logprobs: list[list[Entry]] | None = None,  # noqa: ARG002
    ) -> ChoicesDecision:
        """Return the text with the greatest mean log-probability per token."""
        best = _first_best(normalized_prompt_logprobs)
        meta = _meta(normalized_prompt_logprobs, input_token_logprobs, output_token_logprobs)
        return ChoicesDecision(choices[best], meta)

    def __repr__(self) -> str:
        return "token_length_normalized"


class GreedyTokenSelection:
    """Compares the choices token by token, and keeps those with the greatest log-probability.

    After the end of a short choice, the mean of its log-probabilities is compared instead.
    """

    requires_unconditional_logprobs = False

    def __call__(
        self,
        *,
        choices: list[str],
        normalized_prompt_logprobs: list[float],
        input_token_logprobs: list[list[Entry]],
        output_token_logprobs: list[list[Entry]],
        unconditional_token_logprobs: list[list[Entry]] | None = None,  # noqa: ARG002
    ) -> ChoicesDecision:
        """Return the text that remains after the tokens were compared one position at a time."""
        rows = [
            [entry[0] for entry in entries if entry[0] is not None]
            for entries in input_token_logprobs
        ]
        longest = max(map(len, rows), default=0)
        matrix = [
            row + [sum(row) / len(row) if row else 0.0] * (longest - len(row)) for row in rows
        ]
        remaining = list(range(len(choices)))
        for column in range(longest):
            best = max(matrix[row][column] for row in remaining)
            remaining = [row for row in remaining if matrix[row][column] == best]
            if len(remaining) == 1:
                break
        meta = _meta(normalized_prompt_logprobs, input_token_logprobs, output_token_logprobs)
        meta["greedy_logprob_matrix"] = matrix
        return ChoicesDecision(choices[remaining[0]], meta)

    def __repr__(self) -> str:
        return "greedy_token_selection"


class UnconditionalLikelihoodNormalized:
    """Chooses the text whose mean log-probability the prompt raises most.

    Without a prompt a choice's first token has no log-probability; it counts as 0.
    """

    requires_unconditional_logprobs = True

    def __call__(
        self,
        *,
        choices: list[str],
        normalized_prompt_logprobs: list[float],
        input_token_logprobs: list[list[Entry]],
        output_token_logprobs: list[list[Entry]],
        unconditional_token_logprobs: list[list[Entry]] | None = None,
    ) -> ChoicesDecision:
        """Return the text whose mean log-probability rises most by the prompt.

        Raises:
            ValueError: the unconditional log-probabilities are missing.
        """
        if unconditional_token_logprobs is None:
            raise ValueError("unconditional_likelihood_normalized needs unconditional logprobs.")
        gains = [
            _mean_gain(conditional, unconditional)
            for conditional, unconditional in zip(
                input_token_logprobs, unconditional_token_logprobs, strict=True
            )
        ]
        meta = _meta(normalized_prompt_logprobs, input_token_logprobs, output_token_logprobs)
        meta["unconditional_token_logprobs"] = unconditional_token_logprobs
        meta["normalized_unconditional_prompt_logprobs"] = gains
        return ChoicesDecision(choices[_first_best(gains)], meta)

    def __repr__(self) -> str:
        return "unconditional_likelihood_normalized"


def _mean_gain(conditional: Sequence[Entry], unconditional: Sequence[Entry]) -> float:
    gains = [
        (entry[0] or 0.0) - (alone[0] or 0.0)
        for entry, alone in zip(conditional, unconditional, strict=False)
    ]
    return sum(gains) / len(gains) if gains else 0.0


def _meta(
    normalized: list[float], entries: list[list[Entry]], outputs: list[list[Entry]]
) -> dict[str, Any]:
    return {
        "normalized_prompt_logprobs": normalized,
        "input_token_logprobs": entries,
        "output_token_logprobs": outputs,
    }


token_length_normalized = TokenLengthNormalized()
greedy_token_selection = GreedyTokenSelection()
unconditional_likelihood_normalized = UnconditionalLikelihoodNormalized()

_METHODS: dict[str, ChoicesSamplingMethod] = {
    repr(method): method
    for method in (
        token_length_normalized,
        greedy_token_selection,
        unconditional_likelihood_normalized,
    )
}


def choices_method_named(method: ChoicesSamplingMethod | str) -> ChoicesSamplingMethod:
    """Return the method that is given as an object or by name.

    Raises:
        ValueError: no method has this name.
    """
    if not isinstance(method, str):
        return method
    if method not in _METHODS:
        raise ValueError(f"choices_method {method!r} is none of {', '.join(_METHODS)}.")
    return _METHODS[method]
