"""A simulated session of a coding agent, which makes its next request from the answers so far."""

from __future__ import annotations

from typing import Any, ClassVar

from tests.support.agents.script import TASKS, Answer, ToolUse, answers, result_of, written

_ARGUMENTS = '"arguments": '


class AgentSession:
    """The part of a simulated agent that all agents share; subclasses know the HTTP API.

    Attributes:
        path: path of the requests.
        headers: headers of each request.
        limit_field: name of the request field with the most tokens of the answer.
        turn: number of requests so far.
        cut_turn: the turn whose answer is cut off within its tool call; `None` for none.
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
        """Whether all tasks are done."""
        return not self._tasks

    @property
    def is_cut(self) -> bool:
        """Whether the next answer is cut off."""
        return self.turn == self.cut_turn

    def reply(self, prompt: str) -> str:
        """Return the model's next output, which is the same for every prompt."""
        del prompt
        answer = self._tasks[0][0]
        text = written(answer, [self.call(use) for use in answer.calls])
        return text[: text.index(_ARGUMENTS) + len(_ARGUMENTS) + 12] if self.is_cut else text

    def take(self, answered: Any) -> None:
        """Continue after an answer, with the results of its tool calls or with the next task."""
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
        """Report to the model that its call is cut off; the model then repeats the call."""
        self.keep(answered)
        use = self._tasks[0][0].calls[0]
        self.give_back(answered, [(use, "The call could not be read: it is cut off.")])
        self.turn += 1

    def _next(self) -> Answer:
        answer = self._tasks[0].pop(0)
        if not self._tasks[0]:
            del self._tasks[0]
        return answer

    # ---- implemented by each agent ----

    def request(self) -> dict[str, Any]:
        """Return the body of the next request."""
        raise NotImplementedError

    def call(self, use: ToolUse) -> tuple[str, dict[str, Any]]:
        """Return name and arguments of the tool that the model calls for `use`."""
        raise NotImplementedError

    def ask(self, task: str) -> None:
        """Add a message of the user."""
        raise NotImplementedError

    def keep(self, answered: Any) -> None:
        """Add the model's answer, in the form in which the agent keeps it."""
        raise NotImplementedError

    def give_back(self, answered: Any, results: list[tuple[ToolUse, str]]) -> None:
        """Add the results of the tool calls."""
        raise NotImplementedError
