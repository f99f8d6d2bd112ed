"""A session of an agent: makes its next request from the answers so far."""

from __future__ import annotations

from typing import Any, ClassVar

from tests.support.agents.script import TASKS, Answer, ToolUse, answers, result_of, written

_ARGUMENTS = '"arguments": '


class AgentSession:
    """The part that all agents share; a subclass knows the wire.

    Attributes:
        path: path of the requests.
        headers: headers of each request.
        limit_field: the request's field for the most tokens of its answer.
        turn: number of requests so far.
        cut_turn: the turn whose answer is cut in the middle of its call.
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
        """Return the model's next output, which does not depend on the prompt."""
        del prompt
        answer = self._tasks[0][0]
        text = written(answer, [self.call(use) for use in answer.calls])
        return text[: text.index(_ARGUMENTS) + len(_ARGUMENTS) + 12] if self.is_cut else text

    def take(self, answered: Any) -> None:
        """Continue after a whole answer of the wire, with results or with the next task."""
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
        """Let the agent report what is wrong with the call; the model then repeats the call."""
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
        """Add a message of the user."""
        raise NotImplementedError

    def keep(self, answered: Any) -> None:
        """Note the model's answer, as the agent keeps it."""
        raise NotImplementedError

    def give_back(self, answered: Any, results: list[tuple[ToolUse, str]]) -> None:
        """Note the results of the tools."""
        raise NotImplementedError
