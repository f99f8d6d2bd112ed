"""Headers read entry by entry: the same as all at once, and in small steps."""

from __future__ import annotations

import gc
import io
import json
import struct
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.checkpoint.headers import MAX_ENTRY_CHARS, MAX_TENSORS, entries, read_header
from runtime.errors import StartupError

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


def read(data: bytes) -> dict[str, Any]:
    return dict(entries(io.BytesIO(data), len(data)))


@given(st.dictionaries(st.text(), values), st.booleans(), st.sampled_from([None, 1]))
def test_what_json_says(found: dict[str, Any], ascii_only: bool, indent: int | None) -> None:
    data = json.dumps(found, ensure_ascii=ascii_only, indent=indent).encode()
    assert read(data) == found
    assert read(b" " + data + b"   ") == found


def test_entries_across_the_windows_edges() -> None:
    # Characters of several bytes lie on every edge sooner or later.
    found = {f"\u00e4\U0001f600{i}": ["\u20ac" * (i % 997), i] for i in range(4000)}
    data = json.dumps(found, ensure_ascii=False).encode()
    assert len(data) > 4 * 2**20
    assert read(data) == found
    longest = {"a": "x" * (MAX_ENTRY_CHARS - 2)}
    assert read(json.dumps(longest).encode()) == longest


MALFORMED = {
    "nothing": b"",
    "a list": b"[]",
    "no end": b"{",
    "no value": b'{"a"}',
    "a comma too many": b'{"a": 1,}',
    "no comma": b'{"a": 1 "b": 2}',
    "more behind": b'{"a": 1} x',
    "a number as name": b"{1: 2}",
    "no UTF-8": b'{"\xff": 1}',
    "half a character": b'{"a": 1}\xc3',
    "too deep": b'{"a": ' + b"[" * 10**6,
    "too long": b'{"a": "' + b"x" * MAX_ENTRY_CHARS + b'"}',
    "far too long": b'{"a": [' + b"1," * 4 * 10**6 + b"1]}",
    "a long number": b'{"a": ' + b"9" * 5000 + b"}",
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_what_is_malformed_is_refused_in_one_line(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "model.safetensors"
    data = MALFORMED[kind]
    path.write_bytes(struct.pack("<Q", len(data)) + data)
    with pytest.raises(StartupError, match=r"malformed header|truncated") as caught:
        read_header(path)
    assert len(caught.value.message.splitlines()) == 1


@pytest.mark.slow
@pytest.mark.alone
def test_a_header_of_90_megabytes_holds_the_interpreter_nowhere_long(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    entry = b'"tensor-%016d": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}'
    data = b"{" + b",".join(entry % index for index in range(1_150_000)) + b"}"
    assert 90_000_000 < len(data) < 100_000_000
    path.write_bytes(struct.pack("<Q", len(data)) + data)
    del data
    refusals: list[str] = []

    def work() -> None:
        try:
            read_header(path)
        except StartupError as error:
            refusals.append(error.message)

    # As the front does it: its own objects are no business of the collector.
    gc.freeze()
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(0.001)
    thread = threading.Thread(target=work)
    longest_s, last = 0.0, time.perf_counter()
    thread.start()
    while thread.is_alive():
        time.sleep(0.001)
        now = time.perf_counter()
        longest_s, last = max(longest_s, now - last), now
    gc.unfreeze()
    sys.setswitchinterval(interval_s)
    # The whole of it at once is four seconds on an idle machine; a step is milliseconds.
    assert longest_s < 2.0
    assert f"more than {MAX_TENSORS} tensors" in refusals[0]
