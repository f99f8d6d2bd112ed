"""The layers from which families build models. Each layer owns its weights."""
