"""A session of an agent: what it would send next, from what it was answered."""

from __future__ import annotations

from typing import Any, ClassVar

from tests.support.agents.script import TASKS, Answer, ToolUse, answers, result_of, written

_ARGUMENTS = '"arguments": '


class AgentSession:
    """The part that all agents share; a subclass knows the wire.

    Attributes:
        path: of the requests.
        headers: of each of them.
        limit_field: of a request, the most tokens of its answer.
        turn: requests so far.
        cut_turn: the one whose answer is cut in the middle of its call.
    """

    path: str
    headers: ClassVar[dict[str, str]]
    limit_field: ClassVar[str] = "max_tokens"

    def __init__(self, cut_turn: int | None = None) -> None:
        self._tasks = answers()
        self.turn = 0
        self.cut_turn = cut_turn
        self.ask(TASKS[0])

    @property
    def is_over(self) -> bool:
        """Whether every task is done."""
        return not self._tasks

    @property
    def is_cut(self) -> bool:
        """Whether the next answer is cut."""
        return self.turn == self.cut_turn

    def reply(self, prompt: str) -> str:
        """What the model writes next, whatever the prompt is."""
        del prompt
        answer = self._tasks[0][0]
        text = written(answer, [self.call(use) for use in answer.calls])
        return text[: text.index(_ARGUMENTS) + len(_ARGUMENTS) + 12] if self.is_cut else text

    def take(self, answered: Any) -> None:
        """Go on from a whole answer, in the form of the wire: results, or the next task."""
        if self.is_cut:
            self._take_cut(answered)
            return
        answer = self._next()
        self.keep(answered)
        if answer.calls:
            results = [(use, result_of(use, self.turn)) for use in answer.calls]
            self.give_back(answered, results)
        elif self._tasks:
            self.ask(TASKS[-len(self._tasks)])
        self.turn += 1

    def _take_cut(self, answered: Any) -> None:
        """The agent tells the model what is wrong with its call, and the model makes it again."""
        self.keep(answered)
        use = self._tasks[0][0].calls[0]
        self.give_back(answered, [(use, "The call could not be read: it is cut off.")])
        self.turn += 1

    def _next(self) -> Answer:
        answer = self._tasks[0].pop(0)
        if not self._tasks[0]:
            del self._tasks[0]
        return answer

    # ---- of each agent ----

    def request(self) -> dict[str, Any]:
        """The body of the next request."""
        raise NotImplementedError

    def call(self, use: ToolUse) -> tuple[str, dict[str, Any]]:
        """Name and arguments of the function that the model calls for `use`."""
        raise NotImplementedError

    def ask(self, task: str) -> None:
        """The user says something."""
        raise NotImplementedError

    def keep(self, answered: Any) -> None:
        """Note the model's answer, as the agent keeps it."""
        raise NotImplementedError

    def give_back(self, answered: Any, results: list[tuple[ToolUse, str]]) -> None:
        """Note what the tools gave."""
        raise NotImplementedError
