"""Role markup: the table of names and paths, and what is read out of a model's own template."""

import logging
from pathlib import Path

import pytest

from headrace.demo import MODEL_PATH
from headrace.lang.chat_template import (
    ChatTemplate,
    ChatTemplateStyle,
    get_chat_template,
    get_chat_template_by_model_path,
    register_chat_template,
    register_chat_template_matching_function,
)
from headrace.lang.role_markup import template_from_source

TEMPLATES = Path(__file__).resolve().parents[2] / "support" / "chat_templates"
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Bye"},
]


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("deepseek-ai/DeepSeek-V3-0324", "deepseek-v3"),
        ("deepseek-ai/DeepSeek-V3-Base", "default"),
        ("OrionStarAI/Orion-14B-Chat", "claude"),
        ("lmsys/vicuna-7b-v1.5", "vicuna_v1.1"),
        ("meta-llama/Llama-2-7b-chat-hf", "llama-2-chat"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mistral"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3-instruct"),
        ("meta-llama/Llama-4-Scout-17B-16E-Instruct", "llama-4"),
        ("TinyLlama/TinyLlama-1.1B-Chat-v1.0", "chatml"),
        ("Qwen/Qwen2.5-VL-7B-Instruct", "qwen2-vl"),
        ("qwen/qwen2.5-0.5b-instruct", "qwen"),
        ("Qwen/Qwen3-8B", "chatml"),
        ("Qwen/Qwen2.5-7B", "default"),
        ("01-ai/Yi-1.5-9B-Chat", "yi-1.5"),
        ("google/gemma-2-2b-it", "gemma-it"),
        ("google/gemma-4-4b-it", "gemma-4-it"),
        ("openbmb/MiniCPM-V-2_6", "minicpmv"),
        ("openbmb/MiniCPM-o-2_6", "minicpmo"),
        ("CohereForAI/c4ai-command-r-v01", "c4ai-command-r"),
        ("ibm-granite/granite-3.0-8b-instruct", "granite-3-instruct"),
        ("OpenGVLab/InternVL2_5-8B", "internvl-2-5"),
        ("internlm/Intern-S1", "interns1"),
        ("databricks/dbrx-instruct", "dbrx-instruct"),
        ("deepseek-ai/Janus-Pro-7B", "janus"),
    ],
)
def test_a_models_path_decides(path: str, name: str) -> None:
    assert get_chat_template_by_model_path(path).name == name


def test_an_unknown_model_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert get_chat_template_by_model_path("/models/mine-once").name == "default"
    assert [record.message for record in caplog.records if "mine-once" in record.message] != []
    assert len(caplog.records) == 1


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(KeyError, match=r"'chatLM'; known are .*chatml.*llama-3-instruct"):
        get_chat_template("chatLM")


def test_a_users_rule_and_template_come_before_the_table() -> None:
    mine = ChatTemplate("of-a-test", None, {"user": ("<u>", "</u>")})
    register_chat_template(mine)

    @register_chat_template_matching_function
    def match(path: str) -> str | None:
        return "of-a-test" if path == "Qwen/of-a-test-instruct" else None

    assert get_chat_template_by_model_path("Qwen/of-a-test-instruct") is mine
    assert get_chat_template_by_model_path("Qwen/Qwen2.5-7B-Instruct").name == "qwen"
    assert mine.get_prefix_and_suffix("tool", []) == ("", "")


def test_a_conversation_as_chatml_and_as_llama_2_writes_it() -> None:
    assert get_chat_template("chatml").get_prompt(CONVERSATION[:2]) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    )
    assert get_chat_template("llama-2-chat").get_prompt(CONVERSATION) == (
        "[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHi [/INST]Hello </s><s>[INST] Bye [/INST]"
    )
    qwen = get_chat_template("qwen").get_prompt([{"role": "system", "content": None}])
    assert qwen == "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"


def _own(name: str) -> ChatTemplate | None:
    text = (TEMPLATES / f"{name}.jinja").read_text()
    return template_from_source(text, {"bos_token": "<s>", "eos_token": "</s>"}, name)


def test_markup_is_read_from_a_models_template() -> None:
    found = _own("qwen3")
    assert found is not None
    assert found.get_prompt(CONVERSATION) == get_chat_template("chatml").get_prompt(CONVERSATION)
    assert (found.stop_str, found.default_system_prompt) == (("<|im_end|>",), None)
    llama = _own("llama3")
    assert llama is not None
    assert llama.role_prefix_and_suffix["user"] == (
        "<|start_header_id|>user<|end_header_id|>\n\n",
        "<|eot_id|>",
    )
    assert llama.stop_str == ("<|eot_id|>",)


def test_the_demo_models_answer_begins_as_its_chat_begins() -> None:
    source = (MODEL_PATH / "chat_template.jinja").read_text()
    found = template_from_source(source, {}, "demo")
    assert found is not None
    assert found.role_prefix_and_suffix["assistant"][0] == (
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


CASES = {
    "default system": (
        "{% if messages[0].role != 'system' %}<s>[S]Be good.[/S]{% endif %}"
        "{% for m in messages %}[{{ m.role[0] | upper }}]{{ m.content }}[/{{ m.role[0] | upper }}]"
        "{% endfor %}{% if add_generation_prompt %}[A]{% endif %}",
        ("Be good.", ("[S]", "[/S]"), ("[A]", "[/A]"), ChatTemplateStyle.PLAIN),
    ),
    "system inside the first user turn": (
        "{{ bos_token }}{% if messages[0].role == 'system' %}"
        "{% set first = messages[0].content + '\n\n' %}{% set turns = messages[1:] %}"
        "{% else %}{% set first = '' %}{% set turns = messages %}{% endif %}"
        "{% for m in turns %}<turn>{{ 'model' if m.role == 'assistant' else 'user' }}\n"
        "{{ first if loop.first else '' }}{{ m.content | trim }}</turn>\n{% endfor %}"
        "{% if add_generation_prompt %}<turn>model\n<think>\n{% endif %}",
        # An opened thought is left to the model.
        (None, ("", "\n\n"), ("<turn>model\n", "</turn>\n"), ChatTemplateStyle.LLAMA2),
    ),
    "no system": (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}",
        (None, ("", ""), ("assistant: ", "\n"), ChatTemplateStyle.PLAIN),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_shapes_of_templates(case: str) -> None:
    source, (default, system, assistant, style) = CASES[case]
    found = template_from_source(source, {"bos_token": "<s>"}, case)
    assert found is not None
    assert found.default_system_prompt == default
    assert found.role_prefix_and_suffix["system"] == system
    assert found.role_prefix_and_suffix["assistant"] == assistant
    assert found.style is style
    assert found.stop_str


@pytest.mark.parametrize(
    "source",
    [
        # Which turn it is changes the markup: no prefix can say it.
        "{% for m in messages %}{{ loop.index }}{{ m.role }}{{ m.content }}\n{% endfor %}",
        # The texts come in another order, twice, or not at all.
        "{% for m in messages | reverse %}<{{ m.role }}>{{ m.content }}{% endfor %}",
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ m.content }}{% endfor %}",
        "{{ messages[-1].content }}",
        "{% for m in",
    ],
)
def test_what_no_markup_can_say_is_left_to_the_table(source: str) -> None:
    assert template_from_source(source, {}, "odd") is None


@pytest.mark.parametrize(
    ("written", "token"),
    [
        ("{% if part.type == 'image' %}<|see|>{% else %}{{ part.text }}{% endif %}", "<|see|>"),
        ("{% if 'image' in part %}x{% endif %}{{ part.text }}", "<image>"),
        ("{{ part.text }}", "<image>"),
    ],
)
def test_what_a_template_writes_for_an_image(written: str, token: str) -> None:
    source = (
        "{% for message in messages %}[{{ message.role }}]{% if message.content is string %}"
        "{{ message.content }}{% else %}{% for part in message.content %}"
        f"{written}"
        "{% endfor %}{% endif %}[end]{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    found = template_from_source(source, {}, "m")
    assert found is not None
    assert found.image_token == token
