"""The engine's methods that compute probabilities of given tokens or texts after a prompt."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.engine.call_arguments import build_options
from headrace.engine.core import EngineCore
from headrace.engine.on_loop import awaited, waiting
from headrace.engine.scores import ScoreList
from runtime.service.choices import Choices, SelectBody, select
from runtime.service.scoring import ScoreBody, score


class ScoreMethods:
    """The methods of `Engine` that compute probabilities of given tokens or texts."""

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
        """Return the probability of each label token as the next token after `query` and an item.

        Args:
            query: a text, or token ids; with token ids, the items must be token ids too.
            items: one text or several, or lists of token ids.
            label_token_ids: the label tokens, one list for all items or one list for each item.
            apply_softmax: normalise the labels' probabilities to a sum of 1; otherwise they are the
                model's probabilities over the whole vocabulary.
            item_first: put the item before the query.

        Returns:
            For each item a list with one probability for each label.

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
        """Return the probability of each choice as the continuation of a prompt.

        The prompt is computed only once.

        Args:
            prompt: a text.
            choices: texts, or lists of token ids.
            input_ids: token ids instead of `prompt`.
            unconditional: score the choices' tokens without the prompt too.
            rid: a name for the request.

        Returns:
            The answer of `/v1/select`: `choices`, in the given order, and `meta_info`. Each choice
            has `token_logprobs` (triples of log-probability, id and text),
            `unconditional_token_logprobs`, the sum of its log-probabilities `logprob`, and its
            probability relative to all choices `prob`.

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
