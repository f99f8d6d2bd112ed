"""The input and output files of `headrace batch`; an interrupted output file can be continued."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_OPENAI_KEYS = frozenset({"method", "url", "body"})
# Ids of answers in OpenAI's format: this prefix, then the number of the input line from 0.
_OPENAI_ID = "batch_req_"


class BatchFileError(ValueError):
    """The input or output file cannot be used; the message names the file and the reason."""


@dataclass(frozen=True)
class BatchLine:
    """One line of the input: a request, or the reason why the line is not one.

    Attributes:
        index: number of the line in the input file, counted from 0; blank lines count too.
        request: the line's JSON object; empty if the line is not a JSON object.
        problem: the reason why the line is not a valid request, or `None`.
    """

    index: int
    request: dict[str, Any]
    problem: str | None = None

    @property
    def is_openai(self) -> bool:
        """Whether the line is in OpenAI's batch format; its answer is then in this format too."""
        return not _OPENAI_KEYS.isdisjoint(self.request)

    @property
    def label(self) -> Any:
        """The caller's own name for the request, echoed in the answer."""
        custom_id = self.request.get("custom_id")
        return custom_id if self.is_openai else self.request.get("id", custom_id)


def read_lines(path: Path) -> Iterator[BatchLine]:
    """Yield a `BatchLine` for every line of the input file that is not blank, in order."""
    with path.open("rb") as lines:
        for index, raw in enumerate(lines):
            if not raw.strip():
                continue
            try:
                request = json.loads(raw)
            except ValueError as error:
                yield BatchLine(index, {}, f"The line is not JSON: {error}.")
                continue
            if isinstance(request, dict):
                yield BatchLine(index, request)
            else:
                yield BatchLine(index, {}, "The line is not a JSON object.")


class BatchOutput:
    """The output file: one JSON object per line, written in the order in which answers come.

    When the file is opened again, its answers are kept. A line cut by a crash and lines with an
    error are dropped, so that their requests run again.
    """

    def __init__(self, path: Path) -> None:
        """Open the file at `path`, or create it.

        Raises:
            BatchFileError: the file is not regular, or holds lines that this command did not write.
        """
        self.path = path
        self.finished: dict[int, Any] = {}
        if path.exists():
            if not path.is_file():
                raise BatchFileError(f"{path} is not a regular file.")
            self._keep_answers()
        self._file = path.open("a", encoding="utf-8")

    def _keep_answers(self) -> None:
        kept = self.path.with_name(self.path.name + ".resuming")
        with self.path.open("rb") as old, kept.open("wb") as new:
            for number, raw in enumerate(old, 1):
                if not raw.endswith(b"\n"):
                    break
                record = self._record(raw, number)
                index = _index_of(record)
                if has_failed(record) or index in self.finished:
                    continue
                self.finished[index] = record.get("custom_id", record.get("id"))
                new.write(raw)
        os.replace(kept, self.path)

    def _record(self, raw: bytes, number: int) -> dict[str, Any]:
        try:
            record = json.loads(raw)
        except ValueError:
            record = None
        if not isinstance(record, dict) or not isinstance(_index_of(record), int):
            raise BatchFileError(
                f"{self.path}, line {number}, was not written by this command; name another file."
            )
        return record

    def has(self, line: BatchLine) -> bool:
        """Whether `line` already has an answer.

        Raises:
            BatchFileError: the file has an answer to this line, but to a request with another `id`.
                So it is the output of another input file.
        """
        if line.index not in self.finished:
            return False
        known = self.finished[line.index]
        if known != line.label:
            raise BatchFileError(
                f"{self.path} answers request {known!r}, but the input has {line.label!r} on "
                f"line {line.index + 1}: it belongs to another input."
            )
        return True

    def write(self, line: BatchLine, answer: dict[str, Any]) -> None:
        """Append the answer of `line` to the file and flush it, so that a stop does not lose it."""
        if line.is_openai:
            record = {"id": f"{_OPENAI_ID}{line.index}", "custom_id": line.label, **answer}
        else:
            record = {"index": line.index, "id": line.label, **answer}
            if record["id"] is None:
                del record["id"]
        self._file.write(json.dumps(record, ensure_ascii=False) + "\n")
        self._file.flush()

    def __enter__(self) -> BatchOutput:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _index_of(record: dict[str, Any]) -> Any:
    """Return the number of the input line that `record` answers.

    Returns `None` if this command did not write `record`.
    """
    number = str(record.get("id")).removeprefix(_OPENAI_ID)
    if "custom_id" in record and number.isdigit():
        return int(number)
    return record.get("index")


def has_failed(record: dict[str, Any]) -> bool:
    """Whether the answer `record` is a failure; its request then runs again."""
    if record.get("error") is not None:
        return True
    response = record.get("response")
    return isinstance(response, dict) and response.get("status_code") != 200
