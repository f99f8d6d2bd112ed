"""`suffix` of completions: the prompt that each family of models was trained to fill in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import AddedToken

from openai_api.infill import FORMS, Infill, InfillForm
from runtime.client.admission import EngineLimits
from runtime.text.tokenizer import Tokenizer
from tests.support.fake_engine import BOS, byte_tokenizer
from tests.support.tiny_tokenizers import KINDS, llama2, write_folder

LIMITS = EngineLimits(4096, 4096 * 4, 1000)
PARTS = [("def f(a):\n    ", "\n    return x"), ("a b", " tail"), ("x", "\n"), ("ü☺", ")☺ ü")]


def with_tokens(backend: Any, form: InfillForm) -> Any:
    marks = (form.prefix, form.suffix, form.middle, *form.ends)
    backend.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    return backend


async def test_code_llama_is_asked_as_transformers_asks_it(tmp_path: Path) -> None:
    backend = with_tokens(llama2(), FORMS["CodeLlama"])
    folder = write_folder(tmp_path, backend, bos_token="<s>", eos_token="</s>")
    reference = transformers.CodeLlamaTokenizer(tokenizer_file=str(folder / "tokenizer.json"))
    infill = Infill.of(Tokenizer.from_folder(folder))
    assert infill is not None
    for prefix, suffix in PARTS:
        wanted = reference(f"{prefix}<FILL_ME>{suffix}").input_ids
        assert await infill.encode([prefix], suffix, LIMITS) == [wanted]
    assert infill.stop_ids == [backend.token_to_id("▁<EOT>")]


@pytest.mark.parametrize("kind", ["gpt2", "llama3"])
@pytest.mark.parametrize("name", [name for name in FORMS if name != "CodeLlama"])
async def test_the_others_are_asked_as_one_text(tmp_path: Path, name: str, kind: str) -> None:
    form = FORMS[name]
    folder = write_folder(tmp_path, with_tokens(KINDS[kind](), form))
    tokenizer = Tokenizer.from_folder(folder)
    infill = Infill.of(tokenizer)
    assert infill is not None
    assert infill.form is form
    for prefix, suffix in PARTS:
        text = f"{form.prefix}{prefix}{form.suffix}{suffix}{form.middle}"
        assert await infill.encode([prefix], suffix, LIMITS) == [tokenizer.encode(text)]


async def test_the_route(make_front: Any, events: Any) -> None:
    tokenizer = byte_tokenizer()
    with_tokens(tokenizer.backend, FORMS["StarCoder"])
    tokenizer = Tokenizer(tokenizer.backend, {"bos_token": BOS}, None)
    front = make_front(lambda prompt: prompt, engine_options={"tokenizer": tokenizer})
    wanted = "<fim_prefix>ab<fim_suffix>yz<fim_middle>"
    asked = {"suffix": "yz", "max_tokens": 99, "skip_special_tokens": False}
    for prompt in ("ab", [97, 98]):
        answer = (await front.complete(prompt, **asked, stop_token_ids=[7])).json()
        assert answer["choices"][0]["text"] == wanted
        assert answer["usage"]["prompt_tokens"] == 7
    ends = {tokenizer.backend.token_to_id(text) for text in ("<|endoftext|>", "<file_sep>")}
    assert set(front.engine.requests[0].spec.sampling.stop_token_ids) == {7, *ends}
    chunks = events(await front.complete(["ab", "c"], stream=True, **asked))
    texts = ["", ""]
    for chunk in chunks:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == [wanted, wanted.replace("ab", "c")]
    refused = await front.complete("ab", **asked, echo=True)
    assert (refused.status_code, refused.json()["param"]) == (400, "echo")
    # Nothing to fill in before: an ordinary prompt.
    plain = (await front.complete("ab", suffix="", max_tokens=99)).json()
    assert plain["choices"][0]["text"] == "ab"


async def test_other_models_say_which_can(make_front: Any) -> None:
    answer = await make_front().complete("ab", suffix="yz")
    assert answer.status_code == 400
    assert "Qwen2.5-Coder" in answer.json()["message"]
    assert Infill.of(Tokenizer.without_vocabulary()) is None
