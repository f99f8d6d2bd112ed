"""Decides from which folders a running server may load weights. Front-safe: no torch."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from runtime.checkpoint.demo import DEMO_NAMES
from runtime.checkpoint.gguf.files import is_gguf
from runtime.checkpoint.hub import is_local, resolve_model_folder
from runtime.errors import StartupError


def default_root(model_folder: Path) -> Path:
    """Return the parent of a model's folder; the folder itself if its parent is the root."""
    folder = model_folder.absolute()
    if is_gguf(folder):
        folder = folder.parent
    return folder if folder.parent == Path(folder.anchor) else folder.parent


def own_names(model_path: str) -> frozenset[str]:
    """Return the names by which clients may request the folder that the server was started with.

    These are the given name, the full path, and the path its links led to at the start. Links may
    lead elsewhere by now, for example to a new release; the first two names follow them.
    """
    if not is_local(model_path) or model_path in DEMO_NAMES:
        return frozenset({model_path})
    full = os.path.abspath(Path(model_path).expanduser())
    return frozenset({model_path, full, os.path.realpath(full)})


@dataclass(frozen=True)
class WeightRoots:
    """The folders from which a client may load weights.

    A link in a root is allowed wherever it points if the operator made it: it belongs to the
    server's user, to the root's owner or to the superuser. Others may have write access to the
    root.

    Attributes:
        folders: the roots; a folder of weights must be in one of them.
        may_download: whether a hub id is fetched; its folder may then be elsewhere.
        own: names of the server's own folder (see `own_names`), which is always allowed.
    """

    folders: tuple[str, ...]
    may_download: bool = False
    own: frozenset[str] = frozenset()

    def find(self, path_or_id: str) -> Path:
        """Return the folder of a model that may be loaded.

        Raises:
            StartupError: there is no such folder, or it is in no root.
        """
        if self.may_download and not is_local(path_or_id):
            return resolve_model_folder(path_or_id)
        named = Path(path_or_id)
        # An unknown user is refused further below.
        with contextlib.suppress(RuntimeError):
            named = named.expanduser()
        # `..` after a link may be another folder than its name says, and the name is checked.
        is_plain = not named.is_absolute() and ".." not in named.parts
        wanted = path_or_id if is_plain else os.path.normpath(named)
        is_own = path_or_id in self.own or wanted in self.own
        # First by its name alone, so that nothing outside is accessed.
        if os.path.isabs(wanted) and not is_own and not self._hold(Path(wanted)):
            raise self._refused(path_or_id)
        folder = resolve_model_folder(wanted, may_download=False)
        # The hub's cache has files that link elsewhere, in folders that are not links.
        real = folder.parent.resolve() if is_gguf(folder) else folder.resolve()
        if not (is_own or self._hold(real) or self._lead_to(folder)):
            raise self._refused(path_or_id)
        return folder

    def _hold(self, path: Path) -> bool:
        roots = [Path(each).expanduser().absolute() for each in self.folders]
        return any(path.is_relative_to(root) for each in roots for root in (each, each.resolve()))

    def _lead_to(self, folder: Path) -> bool:
        path = Path(os.path.abspath(folder))
        roots = (Path(each).expanduser().absolute() for each in self.folders)
        return any(_leads_to(root, path) for root in roots)

    def _refused(self, path_or_id: str) -> StartupError:
        shown = path_or_id if len(path_or_id) <= 256 else f"{path_or_id[:256]}..."
        return StartupError(
            f"{shown!r} lies in none of the folders that this server may load weights from; start "
            "it with --weights-root for that one"
        )


@dataclass(frozen=True)
class AdapterRoots:
    """The folders from which a client may load adapters.

    Attributes:
        weights: the roots of weights, which hold for adapters, too; `None` allows every folder of
            this machine.
    """

    weights: WeightRoots | None

    def find(self, path: str) -> Path:
        """Return the folder of an adapter that may be loaded; nothing is downloaded.

        Raises:
            StartupError: there is no such folder, or it is in no root.
        """
        if self.weights is not None:
            return self.weights.find(os.path.abspath(os.path.expanduser(path)) if path else path)
        try:
            folder = Path(path).expanduser().absolute()
            if path and folder.is_dir():
                return folder
        except (OSError, ValueError, RuntimeError) as error:
            raise StartupError(f"{path[:256]!r} is not a folder: {error}") from error
        raise StartupError(
            f"{path[:256]!r} is not a folder; adapters are not downloaded from a hub"
        )


def _leads_to(root: Path, path: Path) -> bool:
    """Whether `path` is in `root` by its name, and every link on the way is the operator's."""
    if not path.is_relative_to(root):
        return False
    try:
        trusted = {0, os.geteuid(), root.stat().st_uid}
        place = root.resolve()
        for part in path.relative_to(root).parts:
            place /= part
            if place.is_symlink():
                if place.lstat().st_uid not in trusted:
                    return False
                place = place.resolve()
    except OSError:
        return False
    return True
