"""Every line of every registry loads."""

import dataclasses
import importlib
import pkgutil
from importlib.util import find_spec
from types import ModuleType

import pytest

import openai_api
import runtime
import runtime.ipc.process
from runtime.config.options import KernelArgs
from runtime.config.registry import Registry, load_object
from runtime.models.attention.backend import ATTENTION_BACKENDS, INVARIANT_ATTENTION
from runtime.models.model import Model
from runtime.models.registry import ADAPTED, FAMILIES

# Imported as children only: their start-up belongs to a process of its own.
SKIPPED = ["runtime.ipc.process"]
# Modules whose library is an extra of its own.
OPTIONAL = {
    "runtime.grammar.xgrammar": "xgrammar",
    "runtime.grammar.llguidance": "llguidance",
    "runtime.grammar.llguidance_tags": "llguidance",
}
SKIPPED += [name for name, library in OPTIONAL.items() if find_spec(library) is None]


def modules(package: ModuleType) -> list[ModuleType]:
    names = [m.name for m in pkgutil.walk_packages(package.__path__, package.__name__ + ".")]
    return [importlib.import_module(name) for name in names if name not in SKIPPED]


def registries() -> dict[str, Registry[object]]:
    found: dict[int, tuple[str, Registry[object]]] = {}
    for module in [*modules(runtime), *modules(openai_api), runtime.ipc.process]:
        for name, value in vars(module).items():
            if isinstance(value, Registry):
                found.setdefault(id(value), (f"{module.__name__}.{name}", value))
    return dict(found.values())


REGISTRIES = registries()


def test_there_are_registries() -> None:
    assert len(REGISTRIES) >= 4


@pytest.mark.parametrize("where", sorted(REGISTRIES))
def test_every_entry_loads(where: str) -> None:
    registry = REGISTRIES[where]
    for name, path in registry.entries.items():
        if path.partition(":")[0] not in SKIPPED:
            assert registry.load(name) is not None


@pytest.mark.parametrize("architecture", FAMILIES)
def test_every_family_loads(architecture: str) -> None:
    family = FAMILIES[architecture]
    assert callable(load_object(family.spec))
    model = load_object(family.model)
    assert isinstance(model, type)
    assert issubclass(model, Model)


def test_every_family_is_registered() -> None:
    named = {family.spec.split(":")[0] for family in FAMILIES.values()}
    specs = {module.__name__ for module in modules(runtime) if module.__name__.endswith(".spec")}
    # What dense decoders share is not a family, nor is what serves those without one.
    assert specs - {"runtime.models.decoder.spec", ADAPTED.spec.split(":")[0]} == named


def test_every_attention_backend_can_be_asked_for() -> None:
    (field,) = (f for f in dataclasses.fields(KernelArgs) if f.name == "attention_backend")
    # Those that are taken in place of another are no choices of their own.
    by_themselves = set(ATTENTION_BACKENDS) - (
        set(INVARIANT_ATTENTION.values()) - set(INVARIANT_ATTENTION)
    )
    assert set(field.metadata["choices"]) == {"auto", *by_themselves}
