"""The number of private names, patched modules and sleeps in tests may only fall."""

from tests.support.waiting import until
from tools.code_lines import files_here
from tools.count_test_smells import KINDS, count

# By `python -m tools.count_test_smells`; `--list KIND` names the places. A commit that removes some
# lowers the number, and none raises it.
MOST = {"private": 66, "patched": 37, "slept": 26}
INSTEAD = {
    "private": "drive what is public, or give the seam that is missing a name",
    "patched": "pass what differs as an argument",
    "slept": f"wait for what happens, by {until.__module__}",
}


def test_no_place_is_added() -> None:
    found = count(files_here(["tests"]))
    too_many = {
        kind: f"{found[kind]} places, at most {MOST[kind]}: {INSTEAD[kind]}"
        for kind in KINDS
        if found[kind] > MOST[kind]
    }
    assert not too_many
