"""`item_reference`: items of stored responses by their ids."""

from __future__ import annotations

from typing import Any

from openai_api.responses.response_store import MemoryStore
from openai_api.schemas.responses import MAX_ITEMS
from runtime.client.tenant import acting_for
from tests.unit.openai_api.test_responses import ADD, CALL, THOUGHT, answered, ask, prompt_of


async def test_references_stand_for_stored_items(make_front: Any) -> None:
    store = MemoryStore(2**20, 3600)
    front = make_front(lambda _: THOUGHT + CALL, responses=store, tools="hermes", reasoning="qwen3")
    begun = await answered(front, tools=[ADD])
    user = {"role": "user", "content": "Hello"}
    call_id = begun["output"][-1]["call_id"]
    result = {"type": "function_call_output", "call_id": call_id, "output": "3"}
    named = [{"type": "item_reference", "id": item["id"]} for item in begun["output"]]
    # An object with only an id is a reference, too.
    bare = [{"id": item["id"]} for item in begun["output"]]
    for said in (named, bare):
        later = await answered(front, [user, *said, result], tools=[ADD])
        by_reference = prompt_of(front)
        await answered(front, [user, *begun["output"], result], tools=[ADD])
        assert prompt_of(front) == by_reference
        # The items are stored, not the references: the next turn needs no earlier response.
        assert (await store.get(later["id"])).items[1:-1] == begun["output"]
    with acting_for("another"):
        refused = await ask(front, [user, *named, result])
    assert refused.status_code == 404
    await store.delete(begun["id"])
    refused = await ask(front, [user, *named, result])
    assert refused.status_code == 404
    error = refused.json()["error"]
    assert error["param"] == "input[1]"
    assert f"item with id '{named[0]['id']}' not found" in error["message"]
    assert (await ask(front, [{"type": "item_reference", "id": "msg_1"}])).status_code == 404


async def test_too_many_references_are_refused_before_they_are_looked_up(make_front: Any) -> None:
    store = MemoryStore(2**20, 3600)
    front = make_front(responses=store)
    begun = await answered(front)
    named = {"type": "item_reference", "id": begun["output"][0]["id"]}
    refused = await ask(front, [named] * (MAX_ITEMS + 1))
    assert refused.status_code == 400
    assert f"at most {MAX_ITEMS} items" in refused.json()["error"]["message"]
