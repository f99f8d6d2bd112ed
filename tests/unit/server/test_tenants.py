"""Keys of `--api-keys-file` are separate: each has its own sessions, `rid`s and bounds."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from runtime.client.session_store import MAX_SESSIONS
from runtime.client.tenant import acting_for
from server.entry.tenants import read_tenants
from tests.support.fake_server import FakeServer
from tests.support.waiting import until_in_loop

OPERATOR, ADMIN, ONE, TWO = "operator", "admin", "one", "two"
OPEN = {"capacity_of_str_len": 1000, "session_id": "s"}
ROUTES: dict[str, dict[str, Any]] = {
    "/generate": {"text": "b"},
    "/v1/completions": {"model": "m", "prompt": "b"},
    "/v1/chat/completions": {"model": "m", "messages": [{"role": "user", "content": "b"}]},
}


class Server(FakeServer):
    """One with the keys of two tenants; a prompt that holds `wait` runs until it is aborted."""

    def __init__(self, folder: Path) -> None:
        """Build it."""
        keys = folder / "keys"
        keys.write_text(f"{ONE}\n{TWO}\n")
        super().__init__(
            folder,
            engine_options={"hold": "wait"},
            api_key=OPERATOR,
            admin_api_key=ADMIN,
            api_keys_file=str(keys),
        )

        self.tenants = [*read_tenants(self.context.config.http).values()]

    def sessions_of(self, tenant: str) -> bool:
        """Whether a tenant has the session that tests open."""
        with acting_for(tenant):
            return OPEN["session_id"] in self.context.sessions

    async def ask(self, key: str, path: str, **body: Any) -> httpx.Response:
        """POST as the owner of `key`."""
        headers = {"Authorization": f"Bearer {key}"}
        return await self.client.post(path, json=body, headers=headers)


@pytest.fixture
def server(tmp_path: Path) -> Server:
    return Server(tmp_path)


def told(answer: httpx.Response) -> tuple[int, str]:
    """What an answer tells, but the name that was asked for."""
    return answer.status_code, answer.text


async def test_a_session_of_another_key_is_as_one_that_is_not_open(server: Server) -> None:
    assert (await server.ask(ONE, "/open_session", **OPEN)).json() == "s"
    joins = {"session_params": {"id": "s"}}
    first = await server.ask(ONE, "/generate", text="secret", rid="r", **joins)
    assert first.status_code == 200
    for key in (TWO, OPERATOR):
        for path, body in ROUTES.items():
            for params in ({"id": "s"}, {"id": "s", "rid": "r"}, {"id": "s", "replace": True}):
                foreign = await server.ask(key, path, **body, session_params=params)
                unknown = await server.ask(key, path, **body, session_params={**params, "id": "x"})
                assert told(foreign)[0] == 404, (key, path)
                assert foreign.text == unknown.text.replace("'x'", "'s'")
        closed = [await server.ask(key, "/close_session", session_id=name) for name in "sx"]
        assert [each.status_code for each in closed] == [404, 404]
        assert closed[0].text == closed[1].text.replace("'x'", "'s'")
    # All of it is still there.
    more = {"session_params": {"id": "s", "rid": "r"}}
    again = await server.ask(ONE, "/generate", text="b", **more)
    assert again.json()["meta_info"]["prompt_tokens"] > len("secret")
    # The same name, another session.
    assert (await server.ask(TWO, "/open_session", **OPEN)).json() == "s"
    assert (await server.ask(TWO, "/generate", text="b", **more)).status_code == 400
    own = await server.ask(TWO, "/generate", text="b", **joins)
    assert own.json()["meta_info"]["prompt_tokens"] == 1
    assert (await server.ask(ONE, "/close_session", session_id="s")).status_code == 200
    assert (await server.ask(TWO, "/generate", text="b", **joins)).status_code == 200


async def test_the_sessions_of_a_key_lock_no_other_one_out(server: Server) -> None:
    assert (await server.ask(ONE, "/open_session", **OPEN)).status_code == 200
    (tenant,) = (each for each in server.tenants if server.sessions_of(each))
    with acting_for(tenant):
        for _ in range(MAX_SESSIONS - 1):
            server.context.sessions.open(1)
    assert (await server.ask(ONE, "/open_session", capacity_of_str_len=1)).status_code == 503
    for key in (TWO, OPERATOR):
        assert (await server.ask(key, "/open_session", capacity_of_str_len=1)).status_code == 200


async def test_names_of_requests_are_each_keys_own(server: Server) -> None:
    running = {
        key: asyncio.create_task(server.ask(key, "/generate", text="wait", rid="same"))
        for key in (ONE, TWO, OPERATOR)
    }
    client = server.context.client
    await until_in_loop(lambda: client.num_in_flight == 3)
    assert (await server.ask(ONE, "/generate", text="a", rid="same")).status_code == 400
    foreign = asyncio.create_task(server.ask(ONE, "/generate", text="wait", rid="ones"))
    await until_in_loop(lambda: client.num_in_flight == 4)
    # Whether another key has a request of a name is not told, and not changed.
    answers = [await server.ask(TWO, "/abort_request", rid=name) for name in ("ones", "none")]
    assert [each.status_code for each in answers] == [404, 404]
    assert answers[0].text == answers[1].text.replace("none", "ones")
    assert (await server.ask(TWO, "/abort_request", abort_all=True)).status_code == 403
    assert (await server.ask(OPERATOR, "/abort_request", rid="same")).status_code == 403
    assert client.num_in_flight == 4
    assert (await server.ask(TWO, "/abort_request", rid="same")).status_code == 200
    # So it is with explanations.
    told_of = [await server.ask(TWO, "/explain_request", id=name) for name in ("ones", "none")]
    assert [each.status_code for each in told_of] == [404, 404]
    assert told_of[0].text == told_of[1].text.replace("none", "ones")
    for key in (ONE, ADMIN):
        told_of = [await server.ask(key, "/explain_request", id="ones")]
        assert [each["rid"] for each in told_of[0].json()["requests"]] == ["ones"]
    assert (await server.ask(OPERATOR, "/explain_request", id="ones")).status_code == 403
    ended = (await running.pop(TWO)).json()["meta_info"]["finish_reason"]["type"]
    assert (ended, client.num_in_flight) == ("abort", 3)
    # The operator ends what it names, whoever sent it.
    assert (await server.ask(ADMIN, "/abort_request", rid="same")).status_code == 200
    await asyncio.gather(*running.values())
    assert (await server.ask(ADMIN, "/abort_request", rid="none")).status_code == 200
    assert (await server.ask(ADMIN, "/abort_request", abort_all=True)).status_code == 200
    await foreign
