"""Reads from `preprocessor_config.json` how images are prepared for the model. No torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from runtime.checkpoint.json_file import Keys, read_json_object
from runtime.checkpoint.vision_spec import VisionSpec

MAX_SIDE = 2**16
_MAX_PIXELS = MAX_SIDE**2
# The greatest number of a Pillow filter: nearest, Lanczos, bilinear, bicubic, box, Hamming.
_MAX_FILTER = 5
_STEPS = ("do_resize", "do_rescale", "do_normalize")


def read_preprocessor(folder: Path, spec: VisionSpec) -> VisionSpec:
    """Return `spec` with the image settings that the model's folder has in place of the defaults.

    Args:
        folder: folder of the model, or a file that takes the place of its `config.json`.
        spec: settings from the family's `config.json`, with the defaults of its processor.

    Raises:
        StartupError: a step of the preparation is switched off, or a number is out of bounds or
            does not fit the tower; the message has one line.
    """
    keys = _read_keys(folder if folder.is_dir() else folder.parent)
    for step in _STEPS:
        if not keys.flag(step, True):
            raise keys.error(step, "true")
    if keys.flag("do_pan_and_scan", False):
        raise keys.error("do_pan_and_scan", "false")
    for key, own in (("patch_size", spec.patch_size), ("merge_size", spec.merge_size)):
        if spec.resizing == "patches" and keys.integer(key, MAX_SIDE, own) != own:
            raise keys.error(key, f"{own}, as the tower has it")
    spec = replace(
        spec,
        resample=keys.integer("resample", _MAX_FILTER, spec.resample, low=0),
        rescale_factor=keys.number("rescale_factor", 0.0, 1.0, spec.rescale_factor),
        mean=_channels(keys, "image_mean", spec.mean),
        std=_channels(keys, "image_std", spec.std),
    )
    return _with_bounds(keys, spec) if spec.resizing == "patches" else _with_side(keys, spec)


def _read_keys(folder: Path) -> Keys:
    """Read the image processor's keys, which may be in `processor_config.json` (transformers 5)."""
    path = folder / "preprocessor_config.json"
    if path.is_file():
        return Keys(str(path), read_json_object(path))
    path = folder / "processor_config.json"
    whole = Keys(str(path), read_json_object(path) if path.is_file() else {})
    return Keys(f"{path}: image_processor", whole.mapping("image_processor"))


def _channels(
    keys: Keys, key: str, default: tuple[float, float, float]
) -> tuple[float, float, float]:
    value = keys.values.get(key)
    if value is None:
        return default
    numbers: list[Any] = value if isinstance(value, list) else [value] * 3
    is_std = key == "image_std"
    if len(numbers) != 3 or not all(_is_share(number, is_std) for number in numbers):
        raise keys.error(key, f"3 numbers from 0 to 1{', not 0' if is_std else ''}")
    red, green, blue = numbers
    return float(red), float(green), float(blue)


def _is_share(number: object, is_std: bool) -> bool:
    if isinstance(number, bool) or not isinstance(number, int | float):
        return False
    return 0 <= number <= 1 and not (is_std and number == 0)


def _with_bounds(keys: Keys, spec: VisionSpec) -> VisionSpec:
    """Return `spec` with the file's bounds on an image's number of pixels.

    In `size`, the bounds may be called `shortest_edge` and `longest_edge`.
    """
    size = Keys(f"{keys.source}: size", keys.mapping("size"))
    bounds = []
    for key, edge, default in (
        ("min_pixels", "shortest_edge", spec.min_pixels),
        ("max_pixels", "longest_edge", spec.max_pixels),
    ):
        inner = size.integer(edge, _MAX_PIXELS, size.integer(key, _MAX_PIXELS, default))
        bounds.append(keys.integer(key, _MAX_PIXELS, inner))
    least, most = bounds
    cell = (spec.patch_size * spec.merge_size) ** 2
    if most < max(least, cell):
        raise keys.error("max_pixels", f"at least min_pixels, {least}, and a vector's {cell}")
    return replace(spec, min_pixels=least, max_pixels=most)


def _with_side(keys: Keys, spec: VisionSpec) -> VisionSpec:
    """Return `spec`; refuse images of another side than the tower's learned positions have."""
    size = Keys(f"{keys.source}: size", keys.mapping("size"))
    for key in ("height", "width"):
        if size.integer(key, MAX_SIDE, spec.side) != spec.side:
            raise size.error(key, f"{spec.side}, as the tower has it")
    return spec
