"""Which folders a running server may take weights from. Front-safe: no torch."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from runtime.checkpoint.gguf.files import is_gguf
from runtime.checkpoint.hub import is_local, resolve_model_folder
from runtime.errors import StartupError


def default_root(model_folder: Path) -> Path:
    """Where a model's neighbours lie; the folder itself where that would be everything."""
    folder = model_folder.absolute()
    if is_gguf(folder):
        folder = folder.parent
    return folder if folder.parent == Path(folder.anchor) else folder.parent


@dataclass(frozen=True)
class WeightRoots:
    """What a client may have loaded, of all that this process can read.

    Attributes:
        folders: a folder of weights lies in one of them.
        may_download: whether a hub id is fetched, and may then lie elsewhere.
    """

    folders: tuple[str, ...]
    may_download: bool = False

    def find(self, path_or_id: str) -> Path:
        """The folder of a model that may be loaded.

        Raises:
            StartupError: there is none, or it lies elsewhere.
        """
        if self.may_download and not is_local(path_or_id):
            return resolve_model_folder(path_or_id)
        named = Path(path_or_id)
        # A name of no user is left for what comes next to refuse.
        with contextlib.suppress(RuntimeError):
            named = named.expanduser()
        # First by its name alone: nothing outside is looked at.
        if named.is_absolute() and not self._hold(Path(os.path.normpath(named))):
            raise self._refused(path_or_id)
        folder = resolve_model_folder(path_or_id, may_download=False)
        # The hub's cache has links to files elsewhere, in folders that are not links.
        real = folder.parent.resolve() if is_gguf(folder) else folder.resolve()
        if not self._hold(real):
            raise self._refused(path_or_id)
        return folder

    def _hold(self, path: Path) -> bool:
        roots = [Path(each).expanduser().absolute() for each in self.folders]
        return any(path.is_relative_to(root) for each in roots for root in (each, each.resolve()))

    def _refused(self, path_or_id: str) -> StartupError:
        shown = path_or_id if len(path_or_id) <= 256 else f"{path_or_id[:256]}..."
        return StartupError(
            f"{shown!r} lies in none of the folders that this server may load weights from; start "
            "it with --weights-root for that one"
        )
