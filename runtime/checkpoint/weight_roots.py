"""Decides from which folders a running server may load weights and adapters. No torch."""

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
    """Return the parent of a model's folder; the folder itself if its parent is `/`."""
    folder = model_folder.absolute()
    if is_gguf(folder):
        folder = folder.parent
    return folder if folder.parent == Path(folder.anchor) else folder.parent


def own_names(model_path: str) -> frozenset[str]:
    """Return the names by which clients may request the folder that the server was started with.

    They are the name as given, the full path, and the path to which its links led at the start. If
    a link is changed later, for example to a new release, the first two names lead to the new
    folder.
    """
    if not is_local(model_path) or model_path in DEMO_NAMES:
        return frozenset({model_path})
    full = os.path.abspath(Path(model_path).expanduser())
    return frozenset({model_path, full, os.path.realpath(full)})


@dataclass(frozen=True)
class WeightRoots:
    """The folders from which a client may load weights.

    A link inside an allowed folder may lead anywhere if it belongs to the server's user, to the
    folder's owner or to the superuser. Links of other users, who may have write access, are not
    followed.

    Attributes:
        folders: the allowed folders; weights must be inside one of them.
        may_download: whether a hub id is fetched; its folder may then be elsewhere.
        own: names of the server's own model folder (see `own_names`), which is always allowed.
    """

    folders: tuple[str, ...]
    may_download: bool = False
    own: frozenset[str] = frozenset()

    def find(self, path_or_id: str) -> Path:
        """Return the folder of the model `path_or_id`, if a client may load it.

        Raises:
            StartupError: there is no such folder, or it is in none of the allowed ones.
        """
        if self.may_download and not is_local(path_or_id):
            return resolve_model_folder(path_or_id)
        named = Path(path_or_id)
        # A path with an unknown user stays as it is, and is refused below.
        with contextlib.suppress(RuntimeError):
            named = named.expanduser()
        # `..` is removed by name, because after a link it could lead elsewhere than the checked
        # name says.
        is_plain = not named.is_absolute() and ".." not in named.parts
        wanted = path_or_id if is_plain else os.path.normpath(named)
        is_own = path_or_id in self.own or wanted in self.own
        # The name is checked first, so that nothing outside the allowed folders is accessed.
        if os.path.isabs(wanted) and not is_own and not self._hold(Path(wanted)):
            raise self._refused(path_or_id)
        folder = resolve_model_folder(wanted, may_download=False)
        # In the hub's cache, files are links but folders are not, so a GGUF file's folder counts.
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
        weights: the allowed folders, which are those for weights; `None` allows every folder of
            this machine.
    """

    weights: WeightRoots | None

    def find(self, path: str) -> Path:
        """Return the folder of the adapter at `path`, if a client may load it; download nothing.

        Raises:
            StartupError: there is no such folder, or it is in none of the allowed ones.
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
    """Whether `path` is in `root` by its name, and every link on the way is a trusted user's."""
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
