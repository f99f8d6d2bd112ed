"""The demo model's generators tell the truth, and its loss mask and template are as promised."""

import json
import re
import subprocess
import sys
from itertools import islice
from pathlib import Path
from random import Random

import pytest
from tokenizers import Tokenizer

from headrace.demo import MODEL_PATH
from recipes.demo_model import checks
from recipes.demo_model.card import write_card
from recipes.demo_model.conversation import Chat, PlainText
from recipes.demo_model.countries import COUNTRIES
from recipes.demo_model.encode import Encoder
from recipes.demo_model.eval_cases import HELD_OUT_CAPITAL, NEW_WORDS, all_cases
from recipes.demo_model.eval_tools import NEW_TOOLS
from recipes.demo_model.lexicon import WORDS
from recipes.demo_model.render import NO_THOUGHT, TEMPLATE_PATH, render
from recipes.demo_model.tasks import QUESTIONS, SAMPLES, arithmetic, geography, lists, samples
from recipes.demo_model.tasks.tool_calls import call

SUM = re.compile(r"(?<![\d.=] )(\d+) ([-+*/]) (\d+) = (-?\d+)")

CHAIN = re.compile(r"((?:\d+ [-+*] )+\d+) = (\d+)")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL_PATH / "tokenizer.json"))


def test_model_path_needs_no_heavy_import() -> None:
    code = (
        "import sys; from headrace.demo import MODEL_PATH; "
        "assert MODEL_PATH.name == 'model'; "
        "assert not {'torch', 'transformers', 'tokenizers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_checkpoint_is_complete_and_small() -> None:
    names = {path.name for path in MODEL_PATH.iterdir()}
    assert names >= {
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(path.stat().st_size for path in MODEL_PATH.iterdir()) <= 15_000_000
    config = json.loads((MODEL_PATH / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["rope_theta"] > 0
    tokenizer_config = json.loads((MODEL_PATH / "tokenizer_config.json").read_text())
    assert tokenizer_config["chat_template"] == TEMPLATE_PATH.read_text()


def test_the_card_is_what_the_recipe_writes(tmp_path: Path) -> None:
    card = (MODEL_PATH / "README.md").read_text()
    rows = re.findall(r"^\| (.+?) \| (\d+) \| (\d+) \|", card, re.MULTILINE)
    skills = {name: {"right": int(right), "of": int(of)} for name, right, of in rows}
    score = tmp_path / "score.json"
    score.write_text(json.dumps({**skills.pop("all"), "skills": skills}))
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(MODEL_PATH / name)
    write_card(tmp_path, score, "8.2")
    assert (tmp_path / "README.md").read_text() == card


def test_every_generated_operation_is_right() -> None:
    rng = Random(1)
    for _ in range(3000):
        question = arithmetic.operation(rng)
        found = SUM.findall(question.answer)
        assert len(found) == 1, question
        left, sign, right, value = found[0]
        assert eval(f"{left} {sign.replace('/', '//')} {right}") == int(value), question
        assert question.short == value
        assert question.data["result"] == int(value)


def test_every_thought_about_a_sum_is_right() -> None:
    rng = Random(2)
    for _ in range(3000):
        left, sign, right = arithmetic.draw(rng)
        thought = arithmetic.thought_of(left, sign, right)
        assert thought.rstrip(".").endswith(str(arithmetic.result_of(left, sign, right)))
        for expression, value in CHAIN.findall(thought):
            assert eval(expression) == int(value), thought


def test_held_out_pairs_are_not_drawn() -> None:
    rng = Random(3)
    for _ in range(20_000):
        left, _, right = arithmetic.draw(rng)
        assert not arithmetic.is_held_out(left, right)
    share = sum(arithmetic.is_held_out(a, b) for a in range(10, 100) for b in range(10, 100)) / 8100
    assert 0.08 < share < 0.12


def test_comparisons_are_right() -> None:
    rng = Random(4)
    for _ in range(500):
        question = arithmetic.comparison(rng)
        numbers = sorted(int(number) for number in re.findall(r"\d+", question.text))
        wants_small = "smaller" in question.text or "less" in question.text
        assert question.short == str(numbers[0] if wants_small else numbers[-1])


def test_countries() -> None:
    assert len(COUNTRIES) >= 190
    assert len({country.name for country in COUNTRIES}) == len(COUNTRIES)
    capitals = {country.name: country.capital for country in COUNTRIES}
    for name, capital in {
        "France": "Paris",
        "the United States": "Washington, D.C.",
        "the Netherlands": "Amsterdam",
        "Ivory Coast": "Yamoussoukro",
    }.items():
        assert capitals[name] == capital


def test_capital_answers_match_the_table() -> None:
    rng = Random(5)
    pairs = {(country.bare, country.capital) for country in COUNTRIES}
    for _ in range(500):
        question = geography.capital(rng)
        assert (question.data["country"], question.data["capital"]) in pairs
        assert question.short in question.answer


def test_lists_are_numbered_true_and_never_repeat() -> None:
    rng = Random(6)
    for _ in range(500):
        chat = lists.countries_and_capitals(rng)
        said = [m["content"] for m in chat.messages if m["role"] == "assistant"] + [chat.answer]
        entries = [line for text in said for line in text.splitlines()]
        assert len(entries) == len(set(entries))
        for text in said:
            assert checks.is_pair_list(len(text.splitlines()))(text), text


def test_tool_calls_name_a_given_tool_and_fit_its_schema() -> None:
    rng = Random(7)
    for _ in range(2000):
        chat = call(rng)
        declared = {t.get("function", t)["name"]: t.get("function", t) for t in chat.tools}
        assert len(declared) == len(chat.tools)
        bodies = re.findall(r"<tool_call>\n(.*)\n</tool_call>", chat.answer)
        found = [json.loads(body) for body in bodies] if bodies else json.loads(chat.answer)
        for one in found:
            schema = declared[one["name"]]["parameters"]
            arguments = one.get("arguments", one.get("parameters"))
            assert set(arguments) <= set(schema["properties"])
            assert set(schema.get("required", [])) <= set(arguments)


@pytest.mark.parametrize("name", list(SAMPLES))
def test_every_sample_maker_gives_text(name: str) -> None:
    rng = Random(8)
    for _ in range(200):
        sample = SAMPLES[name][1](rng)
        if isinstance(sample, PlainText):
            assert sample.text.strip()
        else:
            assert sample.answer.startswith(sample.forced)
            assert len(sample.answer) > len(sample.forced)


@pytest.mark.parametrize("name", list(QUESTIONS))
def test_every_question_has_its_answers(name: str) -> None:
    rng = Random(9)
    for _ in range(200):
        question = QUESTIONS[name][1](rng)
        assert question.text.strip()
        assert question.answer
        assert question.short
        json.dumps(question.data)


def test_evaluation_is_held_out() -> None:
    training = json.dumps([str(sample) for sample in islice(samples(10), 20_000)])
    for phrase in HELD_OUT_CAPITAL:
        assert phrase.split("{c}")[0].strip() not in training or len(phrase.split("{c}")[0]) < 5
    assert not set(NEW_WORDS) & set(WORDS)
    for tool, request, _ in NEW_TOOLS:
        assert f'"{tool["function"]["name"]}"' not in training
        assert request not in training
    assert len(all_cases()) > 1000


def test_template_without_tools_or_system() -> None:
    text = render([{"role": "user", "content": "Hi"}])
    assert text == f"<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n{NO_THOUGHT}"


def test_template_with_thinking() -> None:
    text = render([{"role": "user", "content": "Hi"}], enable_thinking=True)
    assert text.startswith("<|im_start|>system\n/think<|im_end|>\n")
    assert text.endswith("<|im_start|>assistant\n")
    off = render([{"role": "user", "content": "Hi"}], enable_thinking=False)
    assert off.endswith(NO_THOUGHT)


def test_template_with_tools_calls_and_results() -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    text = render(
        [
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": "Look at é"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"function": {"name": "look", "arguments": {"at": "é"}}}],
            },
            {"role": "tool", "content": "one"},
            {"role": "tool", "content": "two"},
        ],
        [tool],
    )
    assert "Be kind.\n\n# Tools" in text
    assert json.dumps(tool) in text
    assert '<tool_call>\n{"name": "look", "arguments": {"at": "é"}}\n</tool_call>' in text
    assert (
        "<|im_start|>user\n<tool_response>\none\n</tool_response>\n"
        "<tool_response>\ntwo\n</tool_response><|im_end|>\n"
    ) in text


def test_template_drops_old_thoughts() -> None:
    text = render(
        [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "<think>\nsecret\n</think>\n\nHello"},
            {"role": "user", "content": "Again"},
        ]
    )
    assert "secret" not in text
    assert "<|im_start|>assistant\nHello<|im_end|>" in text


def learned(tokenizer: Tokenizer, sample: Chat | PlainText) -> str:
    (row,) = Encoder(tokenizer).encode([sample], Random(0))
    kept = [token for token, wanted in zip(row.ids, row.mask, strict=True) if wanted]
    return tokenizer.decode(kept, skip_special_tokens=False)


def test_loss_is_taken_on_every_assistant_turn(tokenizer: Tokenizer) -> None:
    chat = Chat(
        [
            {"role": "user", "content": "One?"},
            {"role": "assistant", "content": "First."},
            {"role": "user", "content": "Two?"},
        ],
        "Second.",
    )
    assert learned(tokenizer, chat) == "First.<|im_end|>Second.<|im_end|>"


def test_loss_with_thinking_is_on_the_last_turn_only(tokenizer: Tokenizer) -> None:
    chat = Chat(
        [
            {"role": "user", "content": "One?"},
            {"role": "assistant", "content": "First."},
            {"role": "user", "content": "Two?"},
        ],
        "Second.",
        thought="Hm.",
    )
    assert learned(tokenizer, chat) == "<think>\nHm.\n</think>\n\nSecond.<|im_end|>"


def test_no_loss_on_forced_text(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "One?"}]
    chat = Chat(messages, "Answer: Yes.", forced="Answer: ")
    assert learned(tokenizer, chat) == "Yes.<|im_end|>"
    pieces = [('{"a": ', False), ("1", True), ("}", True)]
    chat = Chat(messages, '{"a": 1}', pieces=pieces)
    assert learned(tokenizer, chat) == "1}<|im_end|>"


def test_loss_is_taken_on_plain_text(tokenizer: Tokenizer) -> None:
    assert learned(tokenizer, PlainText("A day.")) == "A day.<|endoftext|>"


@pytest.mark.parametrize(
    "text", ["你好，世界", "👩‍💻 ❤️ 👍🏽", "naïve Ελλάδα\n\t 12345", "𝄞 \u2028 \x00"]
)
def test_tokenizer_round_trips(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_markers_are_single_tokens(tokenizer: Tokenizer) -> None:
    for marker in ("<|im_start|>", "<think>", "</think>", "<tool_call>", "</tool_response>"):
        assert len(tokenizer.encode(marker).ids) == 1
    ids = tokenizer.encode("<think>x</think><|im_end|>").ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<think>x</think>"
    assert len(tokenizer.encode("1234").ids) == 4
