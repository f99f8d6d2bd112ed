"""Tells which libraries for structured output are installed; all of them are optional."""

from importlib.util import find_spec

import pytest

BACKENDS = [name for name in ("xgrammar", "llguidance") if find_spec(name) is not None]
needs_grammars = pytest.mark.skipif(not BACKENDS, reason="neither grammar library is installed")
