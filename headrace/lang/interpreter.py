"""Names that programs import from this module. Each is defined in another file."""

from __future__ import annotations

from headrace.lang.executor import StreamExecutor
from headrace.lang.forking import ProgramStateGroup
from headrace.lang.state import AsyncProgramState, ProgramState

__all__ = ["AsyncProgramState", "ProgramState", "ProgramStateGroup", "StreamExecutor"]
