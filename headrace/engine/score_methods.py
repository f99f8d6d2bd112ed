"""Engine methods that score given tokens and texts after a prompt."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.engine.call_arguments import build_options
from headrace.engine.core import EngineCore
from headrace.engine.on_loop import awaited, waiting
from headrace.engine.scores import ScoreList
from runtime.service.choices import Choices, SelectBody, select
from runtime.service.scoring import ScoreBody, score


class ScoreMethods:
    """The engine's methods that score given tokens and texts."""

    _core: EngineCore

    @waiting
    async def score(
        self,
        query: str | Sequence[int] | None = None,
        items: str | Sequence[str] | Sequence[Sequence[int]] | None = None,
        label_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        apply_softmax: bool = False,
        item_first: bool = False,
    ) -> ScoreList:
        """Return how probable each label is as the token right after `query` and an item.

        Args:
            query: a text, or token ids; then the items are token ids too.
            items: one text or several, or lists of token ids.
            label_token_ids: the labels, for all items or one list for each.
            apply_softmax: normalise the labels' probabilities to a sum of 1; otherwise the
                probabilities are the model's, over the whole vocabulary.
            item_first: put the item before the query.

        Returns:
            One list for each item with one number for each label.

        Raises:
            ValueError: the request is invalid; the engine keeps working.
            EngineDeadError: a process of the engine died, or the engine was shut down.
        """
        options = {
            "query": query,
            "items": items,
            "label_token_ids": label_token_ids,
            "apply_softmax": apply_softmax,
            "item_first": item_first,
        }
        body = build_options("score", ScoreBody, options)
        return ScoreList(await score(self._core.context, body))

    async_score = awaited(score)

    @waiting
    async def select(
        self,
        prompt: str | None = None,
        choices: Sequence[str | Sequence[int]] = (),
        *,
        input_ids: Sequence[int] | None = None,
        unconditional: bool = False,
        rid: str | None = None,
    ) -> Choices:
        """Return how probable each choice is right after the prompt, which is computed once.

        Args:
            prompt: a text.
            choices: texts, or lists of token ids.
            input_ids: token ids instead of `prompt`.
            unconditional: score the choices' tokens without the prompt too.
            rid: a name for the request.

        Returns:
            The answer of `/v1/select`: `choices`, in their order, and `meta_info`. A choice has
            `token_logprobs` (triples of log-probability, id and text),
            `unconditional_token_logprobs`, the sum `logprob` and the share `prob`.

        Raises:
            ValueError: the request is invalid; the engine keeps working.
            EngineDeadError: a process of the engine died, or the engine was shut down.
        """
        options = {
            "text": prompt,
            "input_ids": input_ids,
            "choices": list(choices),
            "unconditional": unconditional,
            "rid": rid,
        }
        return await select(self._core.context, build_options("select", SelectBody, options))

    async_select = awaited(select)
