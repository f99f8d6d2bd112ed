"""Sessions: where a request continues, and how the store stays small."""

import pytest

from runtime.client import session_store as module
from runtime.client.session_store import SessionParams, Sessions
from runtime.client.tenant import TENANT, acting_for
from runtime.errors import InvalidRequest, Overloaded

BOS = 1


class Store:
    """Sessions whose requests run as long as their name is in `running`."""

    def __init__(self, **limits):
        self.running = set()
        self.aborted = []
        self.sessions = Sessions(self.running.__contains__, self.aborted.append, BOS, **limits)

    def run(self, name, new, output=(), **params):
        turn = self.sessions.add(SessionParams(**{"id": "s", **params}), name, new)
        turn.add_output(list(output))
        return turn.prompt().tolist()


@pytest.fixture
def store():
    made = Store()
    assert made.sessions.open(1000, "s") == "s"
    return made


def refused(call, *args, **kwargs):
    with pytest.raises(InvalidRequest) as caught:
        call(*args, **kwargs)
    return caught.value.message


def test_a_chain_goes_on_from_prompt_and_output(store):
    assert store.run("a", [1, 10, 11], [20, 21]) == [1, 10, 11]
    assert store.run("b", [12], [22], rid="a") == [1, 10, 11, 20, 21, 12]
    assert store.run("c", [], [23], rid="b") == [1, 10, 11, 20, 21, 12, 22]
    # The same one twice: two branches that know nothing of each other.
    assert store.run("d", [30], [31], rid="a") == [1, 10, 11, 20, 21, 30]
    assert store.run("e", [13], rid="c") == [1, 10, 11, 20, 21, 12, 22, 23, 13]


def test_a_beginning_of_sequence_stands_at_the_beginning_only(store):
    store.run("a", [BOS, 5], [6])
    assert store.run("b", [BOS, 7], rid="a") == [BOS, 5, 6, 7]


def test_offset_and_dropped_output(store):
    store.run("a", [1, 2, 3], [4, 5])
    assert store.run("b", [9], rid="a", offset=2) == [1, 2, 9]
    assert store.run("c", [9], rid="a", offset=-1) == [1, 2, 3, 4, 9]
    assert store.run("d", [9], rid="a", offset=0) == [1, 2, 3, 4, 5, 9]
    assert store.run("e", [9], [10], rid="a", drop_previous_output=True) == [1, 2, 3, 9]
    assert store.run("f", [11], rid="e") == [1, 2, 3, 9, 10, 11]
    assert store.run("g", [9], rid="b", offset=100) == [1, 2, 9, 9]


def test_replace_forgets_the_branch_and_ends_what_runs_in_it(store):
    store.run("a", [1], [2])
    store.run("b", [3], [4], rid="a")
    store.run("c", [5], rid="b")
    store.running.add("c")
    assert store.run("d", [6], rid="a", replace=True) == [1, 2, 6]
    assert store.aborted == ["c"]
    assert "no request 'b'" in refused(store.run, "e", [], rid="b")
    assert store.run("f", [7], replace=True) == [7]
    assert "no request 'a'" in refused(store.run, "g", [], rid="a")


def test_without_rid_a_request_begins_anew_unless_the_session_streams(store):
    store.run("a", [1], [2])
    assert store.run("b", [3]) == [3]
    store.sessions.open(100, "stream", streaming=True)
    assert store.run("a", [1], [2], id="stream") == [1]
    assert store.run("b", [3], [4], id="stream") == [1, 2, 3]
    assert store.run("c", [5], id="stream") == [1, 2, 3, 4, 5]


def test_refusals(store):
    assert "no open session 'x'" in refused(store.run, "a", [1], id="x")
    assert "no open session" in refused(store.run, "a", [1], id=None)
    store.run("a", [1])
    assert "already" in refused(store.run, "a", [1])
    store.running.add("a")
    assert "not finished" in refused(store.run, "b", [1], rid="a")
    assert "open already" in refused(store.sessions.open, 10, "s")
    refused(store.sessions.open, 0)
    refused(store.sessions.open, 10, "x" * 300)
    refused(store.sessions.open, 10, timeout_s=0)
    refused(store.sessions.open, 10, timeout_s=float("nan"))


def test_a_closed_session_is_gone_and_may_be_closed_again(store):
    assert store.sessions.close("s")
    assert not store.sessions.close("s")
    assert "no open session" in refused(store.run, "a", [1])


def test_a_session_holds_no_more_than_it_was_opened_for(store):
    store.sessions.open(6, "small")
    store.run("a", [1, 2, 3], [4, 5], id="small")
    assert "full" in refused(store.run, "b", [6, 7], id="small", rid="a")
    store.run("b", [6], id="small", rid="a")
    assert store.run("c", [8, 9], id="small", replace=True) == [8, 9]


def test_all_sessions_together_are_bounded(store):
    for number in range(module.MAX_TURNS):
        store.run(str(number), [])
    assert "full" in refused(store.run, "c", [])
    small = Store(max_tokens=5)
    small.sessions.open(100, "t")
    small.run("a", [1] * 5, id="t")
    with pytest.raises(Overloaded):
        small.run("b", [1], id="t")
    while len(store.sessions) < module.MAX_SESSIONS:
        store.sessions.open(1)
    with pytest.raises(Overloaded):
        store.sessions.open(1)


def test_a_tenant_leaves_as_much_room_as_it_takes():
    """So that one with a key of the file cannot lock the others out; the operator may take all."""
    store = Store(max_tokens=12)
    found = {}
    for tenant, added in (("one", 6), ("one", 1), ("two", 3), ("two", 1), ("", 3), ("", 1)):
        with acting_for(tenant):
            if "s" not in store.sessions:
                store.sessions.open(100, "s")
            try:
                store.run(f"r{len(found)}", [1] * added)
            except Overloaded:
                added = 0
        found.setdefault(tenant, []).append(added)
    assert found == {"one": [6, 0], "two": [3, 0], "": [3, 0]}


def test_an_old_session_of_another_tenant_is_closed_but_not_while_it_runs():
    now = [1000.0]
    store = Store(clock=lambda: now[0])
    store.sessions = Sessions(
        lambda rid: (TENANT.get(), rid) in store.running, store.aborted.append, clock=lambda: now[0]
    )
    with acting_for("one"):
        store.sessions.open(100, "s", timeout_s=10)
        store.run("a", [1])
    store.running = {("", "a"), ("one", "a")}
    now[0] += 11
    assert "s" not in store.sessions
    assert len(store.sessions) == 1
    store.running.remove(("one", "a"))
    assert "s" not in store.sessions
    assert not len(store.sessions)


def test_a_session_that_nobody_uses_is_closed():
    now = [1000.0]
    store = Store(clock=lambda: now[0])
    store.sessions.open(100, "t", timeout_s=10)
    store.run("a", [1], id="t")
    now[0] += 9
    store.run("b", [1], id="t", rid="a")
    now[0] += 9
    assert "t" in store.sessions
    # What runs keeps its session.
    store.running.add("b")
    now[0] += 9
    assert "t" in store.sessions
    store.running.clear()
    assert "t" not in store.sessions


def test_a_long_chain_is_put_together_without_recursion(store):
    session = store.sessions.open(10_000)
    store.run("0", [10], id=session)
    for n in range(1, 3000):
        prompt = store.run(str(n), [n + 10], id=session, rid=str(n - 1))
    assert prompt == list(range(10, 3010))
