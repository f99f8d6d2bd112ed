"""Code in a pythonic tool call is read, never run, and not an argument."""

from __future__ import annotations

from pathlib import Path

import pytest

from openai_api.tool_parsers.pythonic import PythonicParser


@pytest.mark.parametrize(
    "code",
    [
        "__import__('os').mkdir({path!r})",
        "open({path!r}, 'w')",
        "(lambda: open({path!r}, 'w'))()",
        "[open({path!r}, 'w') for _ in 'a']",
        "f\"{{open({path!r}, 'w')}}\"",
        "().__class__.__base__.__subclasses__()",
    ],
)
@pytest.mark.parametrize("form", ["[add(a={})]", "[add(a=1, b=[{}])]", "[{}]", "[add(**{})]"])
def test_it_is_not_run(tmp_path: Path, code: str, form: str) -> None:
    made = tmp_path / "made"
    written = form.format(code.format(path=str(made)))
    parser = PythonicParser({"add": {}, "open": {}}, max_calls=None)
    parts = [*parser.feed(written), *parser.finish()]
    assert not made.exists()
    assert all(isinstance(part, str) for part in parts), "a call"
    assert "".join(map(str, parts)) == written
