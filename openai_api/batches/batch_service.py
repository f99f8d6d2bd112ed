"""Files and batches of a server: their stores and the batch runner."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from openai_api.batches.batch_runner import Answer, BatchRunner
from openai_api.batches.batch_store import BatchStore
from openai_api.batches.database import Database
from openai_api.batches.file_store import FileStore
from runtime.config.options import HttpArgs
from runtime.service.context import ServiceContext


@dataclass(frozen=True)
class BatchService:
    """The stores and the runner behind the routes of files and batches."""

    database: Database
    files: FileStore
    batches: BatchStore
    runner: BatchRunner

    async def run(self, context: ServiceContext, answer: Answer) -> None:
        """Remove the leftovers of an earlier server, then run batches until this server ends."""
        await self.files.clean()
        await self.batches.clean()
        await self.runner.run(context, answer)

    async def close(self) -> None:
        """Release the folder so that another server may use it."""
        await self.database.close()


def open_batches(http: HttpArgs, default_folder: Path) -> BatchService | None:
    """Open the stores of files and batches; return None if the options turn them off.

    Args:
        http: the options with the folder and the size limit.
        default_folder: used if the options name no folder; it is deleted when the server ends.

    Raises:
        StartupError: the folder cannot be used.
    """
    max_bytes = int(http.file_store_mb * 2**20)
    if max_bytes <= 0:
        return None
    database = Database(Path(http.file_store) if http.file_store else default_folder)
    files = FileStore(database, max_bytes)
    batches = BatchStore(database, files)
    return BatchService(database, files, batches, BatchRunner(batches, files))
