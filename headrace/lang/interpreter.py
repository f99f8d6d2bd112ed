"""The names that programs import from here; each is defined in its own file."""

from __future__ import annotations

from headrace.lang.executor import StreamExecutor
from headrace.lang.forking import ProgramStateGroup
from headrace.lang.state import AsyncProgramState, ProgramState

__all__ = ["AsyncProgramState", "ProgramState", "ProgramStateGroup", "StreamExecutor"]
