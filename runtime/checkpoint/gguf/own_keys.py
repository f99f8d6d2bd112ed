"""The metadata keys of a GGUF file that begin with its architecture's name. No torch."""

from __future__ import annotations

from typing import Any

from runtime.checkpoint.config_keys import MAX_WIDTH
from runtime.checkpoint.gguf.header import GgufArray, GgufFile
from runtime.checkpoint.json_file import Keys
from runtime.errors import StartupError


def architecture_of(file: GgufFile) -> str:
    """Return the name of the model's architecture, as llama.cpp calls it.

    Raises:
        StartupError: the metadata has no such name.
    """
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str):
        raise StartupError(f"{file.path}: 'general.architecture' is missing")
    return name


class OwnKeys(Keys):
    """The keys of a file's architecture, without its name as their prefix."""

    def __init__(self, file: GgufFile, name: str) -> None:
        prefix = f"{name}."
        own = {
            key.removeprefix(prefix): _same(value)
            for key, value in file.metadata.items()
            if key.startswith(prefix)
        }
        super().__init__(f"{file.path}: {name}", own)
        self.file = file
        self.tensors = {tensor.name: tensor for tensor in file.tensors}

    def has(self, tensor: str) -> bool:
        """Whether the file has a tensor with this name."""
        return tensor in self.tensors

    def of_layers(self, key: str, num_layers: int, *, low: int = 1) -> list[int]:
        """Return a number for each layer, at least `low`; the file may have one for all layers.

        Raises:
            StartupError: the key is absent, or has other values or another length.
        """
        found = self.values.get(key)
        if not isinstance(found, list):
            return [self.integer(key, MAX_WIDTH, low=low)] * num_layers
        if len(found) != num_layers or not all(type(each) is int and each >= low for each in found):
            raise self.error(key, f"a number for each of {num_layers} layers")
        return found


def _same(value: Any) -> Any:
    """Convert an array of numbers: to one number if all are equal, otherwise to a list.

    Other values are returned unchanged.
    """
    if isinstance(value, GgufArray) and not value.is_text and value.count:
        numbers = value.numbers() if value.data else []
        if numbers and all(number == numbers[0] for number in numbers):
            return numbers[0]
        return numbers
    return value
