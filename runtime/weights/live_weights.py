"""Replaces, restores, reads, checks and releases a serving model's weights on one rank.

An update is atomic on its rank: it is kept or undone as a whole. An undo reads the folder that the
weights came from if it is unchanged; otherwise each layer is copied to the host before it is
replaced.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from runtime.checkpoint.check import describe
from runtime.checkpoint.model_spec import WeightSpec
from runtime.errors import InvalidRequest
from runtime.models.layers.parameter import WeightHolder, WeightShard
from runtime.models.model import Model
from runtime.weights.fill import is_elsewhere, load_weights, own_weights
from runtime.weights.load_model import dummy_tensors
from runtime.weights.weight_files import WeightFiles

# A layer's tensors by parameter name, plain, on the host.
_Saved = dict[str, Tensor]
# Ends of names of what decides the form of codes, which a live model keeps.
_FORM = ("_zero", "_order", "_shape")


class LiveWeights:
    """One rank's weights.

    Attributes:
        are_released: whether their memory was released; then only `restore` or a full load may
            follow.
    """

    def __init__(
        self,
        model: Model,
        source: WeightFiles | None,
        beat: Callable[[], None],
        spill_folder: Path,
    ) -> None:
        """Manage the weights of `model`, which is loaded.

        Args:
            model: a model on its device.
            source: the files that hold exactly these weights, if any do.
            beat: called often while tensors are read, as proof of life.
            spill_folder: keeps released weights that no file holds, if they cannot stay on the
                host.
        """
        self._model = model
        self._holders: dict[str, WeightHolder] = dict(model.holders())
        self._is_elsewhere = is_elsewhere(model)
        self._source = source
        self._beat = beat
        self._spill_folder = spill_folder
        # Set from the first change until `keep` or `undo`: copies, files, or "released" for
        # nothing.
        self._undo: dict[str, _Saved] | WeightFiles | Literal["released"] | None = None
        self._undo_source: WeightFiles | None = None
        self._digests: dict[str, str] | None = None
        # Released weights that no model folder holds: copies, or the folder they were spilled to.
        self._backup: dict[str, _Saved] | Path | None = None
        self.are_released = False

    # ---- updates ----

    def load_folder(self, folder: Path) -> None:
        """Replace every weight with the folder's.

        Raises:
            StartupError: the files do not fit, and nothing was changed; or they could not be read
                to the end, and `undo` must follow.
        """
        files = WeightFiles.open(folder, self._model.spec)
        self._load(files.tensors(self._is_elsewhere), partial=False)
        self._source = files

    def load_dummy(self, seed: int) -> None:
        """Replace every weight with random numbers from `seed`."""
        device = self._model.context.device
        self._load(dummy_tensors(self._model.spec, seed, device), partial=False)

    def load_tensors(
        self, shapes: Mapping[str, Sequence[int]], tensors: Iterable[tuple[str, Tensor]]
    ) -> None:
        """Replace some weights with whole tensors, named as in the checkpoint.

        Args:
            shapes: shapes of all tensors, checked before the first one is read.
            tensors: floating-point, on any device.

        Raises:
            InvalidRequest: a name or a shape is wrong, and nothing was changed.
            StartupError: something else does not fit; `undo` must follow.
        """
        self.check(shapes)
        self._load(tensors, partial=True)

    def check(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """Compare names and shapes with the model's.

        Raises:
            InvalidRequest: a name or a shape is wrong, or the weights are released.
        """
        self._check_present()
        specs = {spec.name: spec for spec in self._model.spec.weights}
        specs.update(self._model.spec.weights_in_floats)
        shapes = {self._model.spec.canonical(name): shape for name, shape in shapes.items()}
        unknown = [
            name for name in shapes if name not in specs and not self._model.spec.is_ignored(name)
        ]
        wrong = [
            f"{name} is {list(shape)}, expected {list(specs[name].shape)}"
            for name, shape in shapes.items()
            if name in specs and not specs[name].has_shape(shape)
        ]
        problems = [describe("unknown", unknown), describe("of the wrong shape", wrong)]
        if any(problems):
            raise InvalidRequest("; ".join(filter(None, problems)))

    def _load(self, tensors: Iterable[tuple[str, Tensor]], *, partial: bool) -> None:
        if partial:
            self._check_present()
        assert self._undo is None, "the update before was neither kept nor undone"
        self._undo_source = source = self._source
        if self.are_released:
            self._undo = "released"
        elif source is not None and not partial and source.changed() is None:
            self._undo = source
        else:
            self._undo = {}
        # Even if loading fails, the files no longer match the loaded weights.
        self._source = None
        load_weights(self._model, self._beating(tensors), partial=partial, before=self._save)
        self.are_released = False

    def _save(self, name: str, holder: WeightHolder) -> None:
        if isinstance(self._undo, dict) and name not in self._undo:
            self._undo[name] = _copies(holder)

    def keep(self) -> None:
        """Keep the update."""
        self._undo = self._undo_source = None
        if not self.are_released:
            self._drop_backup()

    def undo(self) -> None:
        """Undo everything since the last `keep`.

        Raises:
            StartupError: the old weights can no longer be read; the weights are now a mixture.
        """
        undo, self._undo = self._undo, None
        if undo is None:
            return
        if undo == "released":
            self._release_all()
        elif isinstance(undo, WeightFiles):
            load_weights(self._model, self._beating(undo.tensors(self._is_elsewhere)))
        else:
            for name, saved in undo.items():
                self._put(self._holders[name], saved)
        self._source, self._undo_source = self._undo_source, None

    # ---- reading ----

    def read(self, name: str, num_rows: int) -> tuple[Tensor, WeightShard] | None:
        """Return this rank's part of a weight's first rows.

        Returns:
            A float32 copy on the host, and the shard, which says where the part belongs; `None` if
            other stages have the weight.

        Raises:
            InvalidRequest: the model has no such weight.
        """
        self._check_present()
        spec = self._spec(name)
        if self._is_elsewhere(spec.name):
            return None
        tensor, shard = self._part(spec, as_numbers=True)
        if shard.num_blocks > 1 or shard.spans:
            # The first rows belong to the first block or span: they are cut after the ranks' parts
            # are joined.
            num_rows = shard.num_rows
        elif shard.shard_dim == 0:
            num_rows = max(0, min(num_rows - shard.start, shard.length))
        return tensor[:num_rows].to("cpu", torch.float32, copy=True).contiguous(), shard

    def _spec(self, name: str) -> WeightSpec:
        wanted = self._model.spec.aliases.get(name, self._model.spec.canonical(name))
        for spec in (*self._model.spec.weights, *self._model.spec.weights_in_floats.values()):
            if spec.name == wanted:
                return spec
        raise InvalidRequest(
            f"The model has no weight {name[:128]!r}; names are those of the checkpoint, such as "
            "'model.embed_tokens.weight'.",
            param="name",
        )

    def _part(self, spec: WeightSpec, *, as_numbers: bool = False) -> tuple[Tensor, WeightShard]:
        holder_name, _, parameter_name = spec.target.rpartition(".")
        holder = self._holders[holder_name]
        parameter = dict(holder.parameters())[parameter_name]
        if as_numbers:
            shard = parameter.number_shards[spec.shard]
            return holder.values(parameter_name, spec.shard), shard
        return holder.part(parameter_name, spec.shard), parameter.shards[spec.shard]

    # ---- a trainer's tests ----

    def digests(self) -> dict[str, str]:
        """Return the SHA-256 of this rank's part of each weight, by checkpoint name."""
        self._check_present()
        found = {}
        for spec in own_weights(self._model):
            tensor, _ = self._part(spec)
            data = tensor.to("cpu").contiguous().view(-1).view(torch.uint8).numpy()
            found[spec.name] = hashlib.sha256(data).hexdigest()  # type: ignore[arg-type]  # arrays have buffers
            self._beat()
        return found

    def snapshot(self) -> None:
        """Store a digest of each weight, with which `differences` compares later weights."""
        self._digests = self.digests()

    def differences(self) -> list[str]:
        """Return the names of the weights that differ from the snapshot.

        Raises:
            InvalidRequest: there is no snapshot.
        """
        if self._digests is None:
            raise InvalidRequest("There is no snapshot to compare with: take one first.")
        before = self._digests
        return [name for name, digest in self.digests().items() if digest != before[name]]

    def destroy(self) -> None:
        """Overwrite every weight with noise, so that an update that omits one is noticed."""
        self._check_present()
        self._source = None
        for holder in self._holders.values():
            saved = _copies(holder)
            noisy = {n: t if n.endswith(_FORM) else _noise(t) for n, t in saved.items()}
            self._put(holder, noisy)
            self._beat()

    # ---- memory ----

    def release(self) -> None:
        """Release the memory of large matrices.

        Matrices that a model folder holds are read from there again later. Others are kept on the
        host, or in files if the host is the device.
        """
        self._check_present()
        if self._source is None or self._source.changed() is not None:
            if self._model.context.device.type == "cpu":
                self._backup = self._spilt()
            else:
                self._backup = {name: _copies(holder) for name, holder in self._holders.items()}
        self._release_all()

    def _spilt(self) -> Path:
        self._spill_folder.mkdir(parents=True, exist_ok=True)
        for name, holder in self._holders.items():
            save_file(_copies(holder), self._spill_folder / name)
            self._beat()
        return self._spill_folder

    def _release_all(self) -> None:
        for holder in self._holders.values():
            holder.release()
        self.are_released = True

    def restore(self) -> None:
        """Restore the memory and weights that `release` released.

        Raises:
            StartupError: the files are gone; the weights stay released.
        """
        if not self.are_released:
            return
        try:
            self._fill_again()
        except BaseException:
            # A partly restored model would keep memory that others need.
            self._release_all()
            raise
        self._drop_backup()
        self.are_released = False

    def _fill_again(self) -> None:
        backup = self._backup
        if backup is None:
            assert self._source is not None, "what has no file has a copy"
            load_weights(self._model, self._beating(self._source.tensors(self._is_elsewhere)))
            return
        for name, holder in self._holders.items():
            self._put(
                holder, load_file(backup / name) if isinstance(backup, Path) else backup[name]
            )
            self._beat()

    def _drop_backup(self) -> None:
        if isinstance(self._backup, Path):
            shutil.rmtree(self._backup, ignore_errors=True)
        self._backup = None

    def _check_present(self) -> None:
        if self.are_released:
            raise InvalidRequest(
                "The weights' memory is released; /resume_memory_occupation brings it back."
            )

    def _beating(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for item in tensors:
            self._beat()
            yield item

    @staticmethod
    def _put(holder: WeightHolder, saved: _Saved) -> None:
        for name, parameter in holder.parameters():
            parameter.restore(saved[name])
        holder.finalize([])


def _noise(tensor: Tensor) -> Tensor:
    if tensor.itemsize == 1:
        # Bytes of any meaning.
        tensor.view(torch.uint8).random_()
        return tensor
    return tensor.normal_() if tensor.is_floating_point() else tensor.random_()


def _copies(holder: WeightHolder) -> _Saved:
    return {name: holder.plain(name).to("cpu", copy=True) for name, _ in holder.parameters()}
