"""`instructor`: every mode that an OpenAI server can answer."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, Field

from tests.clients.scenarios import CAPITAL, MODEL, SUM, Place, Total, need

instructor = need("instructor", "instructor")


def client_for(openai_url: str, mode: str) -> Any:
    from openai import OpenAI

    client = OpenAI(base_url=openai_url, api_key="none", max_retries=0)
    return instructor.from_openai(client, mode=instructor.Mode[mode])


def ask(text: str) -> dict[str, Any]:
    return {"model": MODEL, "temperature": 0, "messages": [{"role": "user", "content": text}]}


@pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA"])
def test_an_answer_in_a_class(openai_url: str, mode: str) -> None:
    chat = client_for(openai_url, mode).chat.completions
    assert isinstance(chat.create(response_model=Total, max_retries=1, **ask(SUM)), Total)
    place = chat.create(response_model=Place, max_retries=1, **ask(CAPITAL))
    assert place.city in ("Oslo", "Quito")


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
def test_a_class_that_fills_while_it_streams(openai_url: str, mode: str) -> None:
    chat = client_for(openai_url, mode).chat.completions
    partial = list(chat.create_partial(response_model=Place, **ask(CAPITAL)))
    assert partial[-1].city in ("Oslo", "Quito")


class Places(BaseModel):
    places: list[Place] = Field(min_length=1, max_length=2)


def test_a_list_of_classes(openai_url: str) -> None:
    chat = client_for(openai_url, "JSON_SCHEMA").chat.completions
    found = chat.create(response_model=Places, max_retries=1, **ask(CAPITAL))
    assert len(found.places) in (1, 2)


def test_a_mistake_is_told(openai_url: str) -> None:
    from instructor.core import InstructorRetryException

    chat = client_for(openai_url, "JSON_SCHEMA").chat.completions
    with pytest.raises(InstructorRetryException, match="2048"):
        chat.create(response_model=Total, max_retries=1, **ask("word " * 5000))
