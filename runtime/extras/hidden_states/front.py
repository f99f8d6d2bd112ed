"""Reads the request field for hidden states, and forms their answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from runtime.client.admission import EngineLimits
from runtime.client.front_extras import AnsweredSample, Asked, FrontExtra
from runtime.errors import InvalidRequest
from runtime.extras.hidden_states.answer import HiddenAnswer
from runtime.requests.extra_spec import ExtraSpec

NAME = "hidden_states"

# The type of `return_hidden_states` for one prompt.
HiddenSwitch = bool | Literal["last"]

LAST = ExtraSpec(NAME, replaces=True)
ALL = ExtraSpec(NAME, prompt_start=0)


class HiddenFields(Protocol):
    """The field of `/generate` that requests hidden states."""

    return_hidden_states: HiddenSwitch | list[HiddenSwitch] | None


class HiddenStatesFront(FrontExtra):
    """Returns the hidden states of the last generated token, or of every token."""

    field = "return_hidden_states"
    advice = 'ask for "last" only'

    def plan(self, body: HiddenFields, asked: Asked) -> Sequence[ExtraSpec | None] | None:
        """Return the spec for each prompt; `None` if the request wants no hidden states.

        Raises:
            InvalidRequest: the server was started without hidden states, or a list has the wrong
                length.
        """
        given = body.return_hidden_states
        if not isinstance(given, list):
            if not given:
                return None
            given = [given] * asked.num_prompts
        if len(given) != asked.num_prompts:
            raise InvalidRequest(
                f"return_hidden_states must have one entry for each of the {asked.num_prompts} "
                f"prompts, got {len(given)}.",
                param="return_hidden_states",
            )
        if any(given):
            check_offered(NAME in asked.offered)
        return [LAST if each == "last" else ALL if each else None for each in given]

    def num_numbers(
        self, spec: ExtraSpec, num_prompt: int, num_output: int, limits: EngineLimits
    ) -> int:
        """Return how many numbers an answer has at most: one row, or a row for each token."""
        return limits.hidden_size * (1 if spec.replaces else num_prompt + num_output)

    def answer(self, spec: ExtraSpec, sample: AnsweredSample) -> HiddenAnswer:
        """Return an empty answer for one sample."""
        return HiddenAnswer(sample.hidden_size, only_last=spec.replaces, as_json=sample.as_json)


def check_offered(hidden_states: bool) -> None:
    """Refuse a request for hidden states if the server was started without them.

    Args:
        hidden_states: whether the server offers hidden states.

    Raises:
        InvalidRequest: it does not.
    """
    if not hidden_states:
        raise InvalidRequest(
            "return_hidden_states needs a server that was started with "
            "--enable-return-hidden-states.",
            param="return_hidden_states",
        )


EXTRA = HiddenStatesFront()
