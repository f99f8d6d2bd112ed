"""Which weights the workers hold, and whether their memory is there."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from runtime.ipc.weight_messages import MemoryTag

logger = logging.getLogger(__name__)


@dataclass
class LoadedWeights:
    """Labels, and memory that was given back.

    Attributes:
        version: label of the weights that are loaded now.
        restart_version: label of those that a worker which is started again loads.
        released: memory that the workers gave back, by tag; no request can be served meanwhile.
    """

    version: str = "default"
    restart_version: str = "default"
    released: frozenset[MemoryTag] = frozenset()

    @property
    def why_refused(self) -> str | None:
        """Why a request cannot be taken, `None` when it can."""
        if not self.released:
            return None
        return (
            f"The engine's memory is released ({', '.join(sorted(self.released))}); "
            "/resume_memory_occupation brings it back."
        )

    def restarted(self) -> None:
        """A worker was started again: it has its memory, and the weights that lie on disk."""
        self.released = frozenset()
        if self.version != self.restart_version:
            logger.error(
                "The weights of version %r died with their worker; it loads those of %r.",
                self.version,
                self.restart_version,
            )
            self.version = self.restart_version
