"""`RecordingBackend` records the answers of another back end, and `ReplayBackend` replays them.

The record is a file of JSON lines. The first line names the model. Each further line has the inputs
of one request, and its answer. With `ReplayBackend`, a program that sends the same requests gets
the same answers without a model, for example in tests, or to check the numbers of a paper.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import threading
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.lang.backend.base import (
    AsyncBackend,
    BaseBackend,
    Generated,
    Meta,
    Prompt,
    TurnPart,
)
from headrace.lang.backend.choose import as_backend
from headrace.lang.chat_template import ChatTemplate, ChatTemplateStyle
from headrace.lang.choices import ChoicesDecision, ChoicesSamplingMethod
from headrace.lang.sampling import SglSamplingParams

if TYPE_CHECKING:
    from headrace.lang.media_input import Media

FORMAT = "headrace.lang.record"
VERSION = 1

Asked = dict[str, Any]
"""The inputs of a request. Requests with equal inputs are the same."""


def _asked(kind: str, s: Prompt, **more: Any) -> Asked:
    asked: Asked = {"kind": kind, "text": s.text_, **more}
    if s.images_:
        asked["media"] = [hashlib.sha256(one.data.encode()).hexdigest() for one in s.images_]
    return asked


def _for_generation(s: Prompt, params: SglSamplingParams) -> Asked:
    return _asked("generate", s, sampling=params.set_fields())


def _for_selection(
    s: Prompt, choices: Sequence[str], temperature: float, method: ChoicesSamplingMethod
) -> Asked:
    return _asked("select", s, choices=list(choices), temperature=temperature, method=repr(method))


def _for_turn(s: Prompt, parts: Sequence[TurnPart]) -> Asked:
    written = [
        {"text": part.text}
        if part.sampling_params is None
        else {"sampling": part.sampling_params.set_fields()}
        for part in parts
    ]
    return _asked("turn", s, parts=written)


class RecordingBackend(AsyncBackend):
    """A back end that passes every request to another back end, and records the answers."""

    def __init__(self, backend: Any, path: str | Path) -> None:
        """Create the file and write its first line.

        Args:
            backend: the back end whose answers are recorded; also a `Runtime` or an `Engine`.
            path: path of the file; an existing file is replaced.
        """
        super().__init__()
        self._inner: BaseBackend = as_backend(backend)
        self.support_api_speculation = self._inner.support_api_speculation
        self.caches_prefixes = self._inner.caches_prefixes
        self.chat_template = self._inner.get_chat_template()
        self._lock = threading.Lock()
        self._file = Path(path).open("w", encoding="utf-8")  # noqa: SIM115  # closed by shutdown
        template = dataclasses.asdict(self.chat_template)
        template["style"] = self.chat_template.style.name
        self._write(
            {
                "format": FORMAT,
                "version": VERSION,
                "model": self._model_name(),
                "chat_template": template,
                "support_api_speculation": self.support_api_speculation,
            }
        )

    def _model_name(self) -> str | None:
        try:
            return self._inner.get_model_name()
        except NotImplementedError:
            return None

    def _write(self, line: dict[str, Any]) -> None:
        # Each line is written at once, so that the file stays readable if the program is killed.
        text = json.dumps(line, ensure_ascii=False, default=str)
        with self._lock:
            self._file.write(f"{text}\n")
            self._file.flush()

    def get_model_name(self) -> str:
        return self._inner.get_model_name()

    async def async_generate(self, s: Prompt, sampling_params: SglSamplingParams) -> Generated:
        asked = _for_generation(s, sampling_params)
        text, meta = await self._inner.async_generate(s, sampling_params)
        self._write({"asked": asked, "text": text, "meta": meta})
        return text, meta

    async def async_generate_stream(
        self, s: Prompt, sampling_params: SglSamplingParams
    ) -> AsyncGenerator[tuple[str, Meta], None]:
        asked = _for_generation(s, sampling_params)
        pieces: list[str] = []
        meta: Meta = {}
        stream = self._inner.async_generate_stream(s, sampling_params)
        try:
            async for piece, meta in stream:
                pieces.append(piece)
                yield piece, meta
        finally:
            await stream.aclose()
        line = {"asked": asked, "text": "".join(pieces), "meta": meta, "pieces": pieces}
        self._write(line)

    async def async_select(
        self,
        s: Prompt,
        choices: list[str],
        temperature: float,
        choices_method: ChoicesSamplingMethod,
    ) -> ChoicesDecision:
        asked = _for_selection(s, choices, temperature, choices_method)
        found = await self._inner.async_select(s, choices, temperature, choices_method)
        self._write({"asked": asked, "text": found.decision, "meta": found.meta_info})
        return found

    async def async_fill_turn(self, s: Prompt, parts: Sequence[TurnPart]) -> list[Generated]:
        asked = _for_turn(s, parts)
        found = await self._inner.async_fill_turn(s, parts)
        self._write({"asked": asked, "filled": [[text, meta] for text, meta in found]})
        return found

    async def async_cache_prefix(self, prefix_str: str, media: Sequence[Media] = ()) -> None:
        await self._inner.async_cache_prefix(prefix_str, media)

    async def async_flush_cache(self) -> bool:
        return await self._inner.async_flush_cache()

    async def async_get_server_info(self) -> dict[str, Any] | None:
        return await self._inner.async_get_server_info()

    def begin_program(self, s: Prompt) -> None:
        self._inner.begin_program(s)

    def end_program(self, s: Prompt) -> None:
        self._inner.end_program(s)

    def shutdown(self) -> None:
        """Close the file; the other back end stays usable."""
        with self._lock:
            self._file.close()


class NotRecorded(RuntimeError):
    """The program sent a request that the record does not contain, or not often enough."""


class ReplayBackend(AsyncBackend):
    """A back end that returns the answers that a `RecordingBackend` has recorded.

    Programs may run in another order than at the recording. If a request was recorded several
    times, its answers are returned in the recorded order. A request without an answer that is left
    raises `NotRecorded`.
    """

    def __init__(self, path: str | Path, *, repeat: bool = False) -> None:
        """Read the whole file.

        Args:
            path: path of the file.
            repeat: after the last answer of a request, return its first answer again.

        Raises:
            ValueError: the file was not written by a `RecordingBackend`.
        """
        super().__init__()
        self._path = Path(path)
        self._repeat = repeat
        self._answers: dict[str, deque[dict[str, Any]]] = defaultdict(deque)
        with self._path.open(encoding="utf-8") as lines:
            try:
                head = json.loads(next(lines, "{}"))
                if head.get("format") != FORMAT or head.get("version") != VERSION:
                    raise ValueError(f"its first line names no {FORMAT} of version {VERSION}")
                for line in lines:
                    found = json.loads(line)
                    self._answers[_key(found["asked"])].append(found)
            except (ValueError, LookupError, AttributeError, TypeError) as error:
                raise ValueError(f"{self._path} is not a record of a back end: {error}") from None
        self._model_name = head["model"]
        self.support_api_speculation = bool(head["support_api_speculation"])
        template = dict(head["chat_template"])
        style = ChatTemplateStyle[template.pop("style")]
        markup = {role: tuple(both) for role, both in template["role_prefix_and_suffix"].items()}
        template["role_prefix_and_suffix"] = markup
        template["stop_str"] = tuple(template["stop_str"])
        self.chat_template = ChatTemplate(**template, style=style)

    def get_model_name(self) -> str:
        return self._model_name or super().get_model_name()

    @property
    def num_left(self) -> int:
        """The number of recorded answers that have not been returned yet."""
        return sum(map(len, self._answers.values()))

    def _take(self, asked: Asked) -> dict[str, Any]:
        answers = self._answers.get(_key(asked))
        if not answers:
            used = " any more" if answers is not None else ""
            raise NotRecorded(
                f"{self._path} holds no answer{used} to this {asked['kind']} request, whose text "
                f"ends with {asked['text'][-80:]!r}."
            )
        found = answers.popleft()
        if self._repeat:
            answers.append(found)
        return found

    async def async_generate(self, s: Prompt, sampling_params: SglSamplingParams) -> Generated:
        found = self._take(_for_generation(s, sampling_params))
        return found["text"], found["meta"]

    async def async_generate_stream(
        self, s: Prompt, sampling_params: SglSamplingParams
    ) -> AsyncGenerator[tuple[str, Meta], None]:
        found = self._take(_for_generation(s, sampling_params))
        for piece in found.get("pieces") or [found["text"]]:
            yield piece, found["meta"]

    async def async_select(
        self,
        s: Prompt,
        choices: list[str],
        temperature: float,
        choices_method: ChoicesSamplingMethod,
    ) -> ChoicesDecision:
        found = self._take(_for_selection(s, choices, temperature, choices_method))
        return ChoicesDecision(found["text"], found["meta"])

    async def async_fill_turn(self, s: Prompt, parts: Sequence[TurnPart]) -> list[Generated]:
        return [(text, meta) for text, meta in self._take(_for_turn(s, parts))["filled"]]

    async def async_flush_cache(self) -> bool:
        return True


def _key(asked: Asked) -> str:
    return json.dumps(asked, sort_keys=True, ensure_ascii=False, default=str)
