"""Replaces, restores, reads, checks and releases the weights of a serving model, on one rank.

An update is atomic on its rank: it is kept or undone as a whole. To undo an update, the old weights
are read from their folder again if the folder is unchanged. If the folder has changed, the update
copies each layer to the host before replacing it.
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

# The tensors of one layer in checkpoint layout, on the host, by parameter name.
_Saved = dict[str, Tensor]
# Endings of the names of tensors that define a quantized format. A live model keeps its format.
_FORM = ("_zero", "_order", "_shape")


class LiveWeights:
    """The weights of one rank.

    Attributes:
        are_released: whether their memory is released. Then only `restore` or a full load may
            follow.
    """

    def __init__(
        self,
        model: Model,
        source: WeightFiles | None,
        beat: Callable[[], None],
        spill_folder: Path,
    ) -> None:
        """Manage the weights of a loaded model.

        Args:
            model: a loaded model on its device.
            source: the files that have exactly these weights; `None` if no files do.
            beat: called often while tensors are read, to show that the process is alive.
            spill_folder: folder for released weights that no file has, if they cannot be kept on
                the host.
        """
        self._model = model
        self._holders: dict[str, WeightHolder] = dict(model.holders())
        self._is_elsewhere = is_elsewhere(model)
        self._source = source
        self._beat = beat
        self._spill_folder = spill_folder
        # What `undo` needs, from the first change until `keep` or `undo`: copies of layers, the
        # files to read again, or "released" if the weights were released before.
        self._undo: dict[str, _Saved] | WeightFiles | Literal["released"] | None = None
        self._undo_source: WeightFiles | None = None
        self._digests: dict[str, str] | None = None
        # Released weights that no model folder has: copies, or the folder with them.
        self._backup: dict[str, _Saved] | Path | None = None
        self.are_released = False

    # ---- updates ----

    def load_folder(self, folder: Path) -> None:
        """Replace all weights with those of a folder.

        Raises:
            StartupError: the files do not fit, and nothing was changed; or they could not be read
                to the end, and `undo` must follow.
        """
        files = WeightFiles.open(folder, self._model.spec)
        self._load(files.tensors(self._is_elsewhere), partial=False)
        self._source = files

    def load_dummy(self, seed: int) -> None:
        """Replace all weights with random numbers, which `seed` determines."""
        device = self._model.context.device
        self._load(dummy_tensors(self._model.spec, seed, device), partial=False)

    def load_tensors(
        self, shapes: Mapping[str, Sequence[int]], tensors: Iterable[tuple[str, Tensor]]
    ) -> None:
        """Replace some weights with whole tensors, named as in the checkpoint.

        Args:
            shapes: shapes of all tensors, checked before the first one is read.
            tensors: pairs of name and floating-point tensor, on any device.

        Raises:
            InvalidRequest: a name or a shape is wrong, and nothing was changed.
            StartupError: something else does not fit; `undo` must follow.
        """
        self.check(shapes)
        self._load(tensors, partial=True)

    def check(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """Check names and shapes of tensors against the model's.

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
        # From here on the loaded weights differ from the files, even if loading fails.
        self._source = None
        load_weights(self._model, self._beating(tensors), partial=partial, before=self._save)
        self.are_released = False

    def _save(self, name: str, holder: WeightHolder) -> None:
        if isinstance(self._undo, dict) and name not in self._undo:
            self._undo[name] = _copies(holder)

    def keep(self) -> None:
        """Make the update final."""
        self._undo = self._undo_source = None
        if not self.are_released:
            self._drop_backup()

    def undo(self) -> None:
        """Undo all changes since the last `keep`.

        Raises:
            StartupError: the old weights can no longer be read, so the weights are now a mixture.
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
        """Return this rank's part of the first rows of a weight.

        Returns:
            A float32 copy on the host, and the shard, which says where in the whole weight the part
            belongs. `None` if only other pipeline stages have the weight.

        Raises:
            InvalidRequest: the model has no such weight.
        """
        self._check_present()
        spec = self._spec(name)
        if self._is_elsewhere(spec.name):
            return None
        tensor, shard = self._part(spec, as_numbers=True)
        if shard.num_blocks > 1 or shard.spans:
            # Here a rank's first rows are not the weight's first rows, so the rows are cut off only
            # after the ranks' parts are joined.
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
        """Store a digest of each weight, for a later comparison by `differences`."""
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
        """Overwrite every weight with noise, to show whether an update replaces all of them."""
        self._check_present()
        self._source = None
        for holder in self._holders.values():
            saved = _copies(holder)
            noisy = {n: t if n.endswith(_FORM) else _noise(t) for n, t in saved.items()}
            self._put(holder, noisy)
            self._beat()

    # ---- memory ----

    def release(self) -> None:
        """Release the memory of the large matrices.

        Matrices that a model folder has are read from it again later. Others are kept on the host,
        or in files if the model runs on the host.
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
        """Allocate the released memory and restore the weights.

        Raises:
            StartupError: the files are gone; the weights stay released.
        """
        if not self.are_released:
            return
        try:
            self._fill_again()
        except BaseException:
            # Memory is given back, because a model that is only partly restored is of no use.
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
        # Values of one byte may have any bits.
        tensor.view(torch.uint8).random_()
        return tensor
    return tensor.normal_() if tensor.is_floating_point() else tensor.random_()


def _copies(holder: WeightHolder) -> _Saved:
    return {name: holder.plain(name).to("cpu", copy=True) for name, _ in holder.parameters()}
