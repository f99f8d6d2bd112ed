"""Holds the options that changed after the start; the parsed options themselves never change."""

from __future__ import annotations

from dataclasses import dataclass, field

from runtime.config.options import ModelArgs


@dataclass(frozen=True)
class Changes:
    """Current values of the options that may change while the server runs.

    Attributes:
        model: the model options that the server was started with.
        options: changed values by option name; `/server_info` shows them instead of the initial
            values.
    """

    model: ModelArgs
    options: dict[str, object] = field(default_factory=dict)

    def rename_model(self, model_path: str) -> None:
        """Record that the weights of `model_path` are the loaded ones."""
        self.options["model_path"] = model_path
        # A served name that the operator chose stays, because clients send it.
        if self.model.served_model_name == self.model.model_path:
            self.options["served_model_name"] = model_path

    @property
    def model_path(self) -> str | None:
        """Folder or hub id of the weights that are loaded now."""
        found = self.options.get("model_path", self.model.model_path)
        return None if found is None else str(found)

    @property
    def served_model_name(self) -> str:
        """The name that `/v1/models` lists; it may change with the weights."""
        return str(self.options.get("served_model_name", self.model.served_model_name) or "")
