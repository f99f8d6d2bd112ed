"""A library is imported without large packages that it does not need here."""

import subprocess
import sys
from pathlib import Path

import pytest

from runtime.grammar.light_import import import_light
from tests.support.grammar_backends import BACKENDS

ROOT = Path(__file__).parents[3]
USES_NAMES = """
import heavy
from heavy import Base

MASK = heavy.tensor(-1, dtype=heavy.int32)

class Processor(Base):
    def fill(self, mask: heavy.Tensor) -> None: ...

HAS_DEVICE = bool(heavy.cuda.is_available())
HAS_PROTOCOL = hasattr(heavy.Tensor, "__protocol__")
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in ("heavy", "light", "light.names", "light.work"):
        sys.modules.pop(name, None)


def test_what_only_names_things_gets_a_stand_in(folder):
    (folder / "heavy.py").write_text("raise SystemExit('imported')")
    (folder / "light.py").write_text(USES_NAMES)
    light = import_light("light", "heavy")
    assert not light.HAS_DEVICE
    assert not light.HAS_PROTOCOL
    assert "heavy" not in sys.modules


def test_what_computes_gets_the_package(folder):
    (folder / "heavy.py").write_text("__version__ = '1.2'")
    (folder / "light.py").write_text("import heavy\nVERSION = heavy.__version__")
    assert import_light("light", "heavy").VERSION == "1.2"


def test_no_part_keeps_a_stand_in_where_another_computes(folder):
    (folder / "heavy.py").write_text("class Tensor: ...\n__version__ = '1.2'")
    package = folder / "light"
    package.mkdir()
    (package / "__init__.py").write_text("from light import names\nfrom light import work")
    (package / "names.py").write_text("from heavy import Tensor")
    (package / "work.py").write_text("import heavy\nVERSION = heavy.__version__")
    light = import_light("light", "heavy")
    assert light.names.Tensor is sys.modules["heavy"].Tensor


def test_what_is_there_already_is_taken(folder):
    (folder / "heavy.py").write_text("int32 = 32")
    (folder / "light.py").write_text("from heavy import int32")
    import heavy

    assert import_light("light", "heavy").int32 == 32
    assert sys.modules["heavy"] is heavy


def test_an_error_of_the_library_is_its_own(folder):
    (folder / "light.py").write_text("raise ValueError('broken')")
    with pytest.raises(ValueError, match="broken"):
        import_light("light", "heavy")
    assert "heavy" not in sys.modules


@pytest.mark.skipif("xgrammar" not in BACKENDS, reason="no xgrammar")
def test_the_compiler_of_grammars_holds_neither_torch_nor_transformers():
    code = """
import sys
import runtime.grammar.compiler
from runtime.grammar.grammar_backend import GRAMMAR_BACKENDS
GRAMMAR_BACKENDS.load("xgrammar")
print(sorted({"torch", "transformers"} & set(sys.modules)), "xgrammar" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[] True"
