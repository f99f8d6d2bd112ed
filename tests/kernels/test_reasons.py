"""A kernel table gives the reason for its choice."""

import pytest

from kernels.table import MEASURED_ON
from tests.kernels.test_tables import TABLES


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.op)
@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_a_choice_says_why(table, device_type, monkeypatch):
    monkeypatch.setattr(table, "unavailable", lambda name: None)
    monkeypatch.setattr(table, "load", lambda name: name)
    choice = table.choose(device_type)
    if choice.name == table.preferred.get(device_type, ("",))[0]:
        assert choice.reason == f"fastest of those measured on {MEASURED_ON[device_type]}"
    else:
        assert choice.reason == f"nothing else for {device_type}"
    assert set(table.preferred) <= set(MEASURED_ON)
    monkeypatch.setattr(table, "unavailable", lambda name: None if name == "reference" else "off")
    assert table.choose(device_type).name == "reference"
    for name in table.preferred.get(device_type, ()):
        if name == "reference":
            break
        assert f"{name}: off" in table.choose(device_type).reason
