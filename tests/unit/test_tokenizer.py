"""The tokenizer against `transformers.AutoTokenizer`, and against texts that break tokenizers."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openai_api.chat_template import load_chat_template
from runtime.errors import InvalidRequest, StartupError
from runtime.text.encoding import encode_texts
from runtime.text.tokenizer import Tokenizer
from runtime.text.tokenizer_conversion import converted_tokenizer_file
from tests.support.tiny_tokenizers import CORPUS, KINDS, gpt2, llama3, wordpiece, write_folder

TEXTS = [
    *CORPUS,
    "",
    " ",
    "  two  spaces ",
    "<s>text</s><think>x</think> <|im_start|>user\n",
    "nul \0 and \x1b control",
    "1234567 tokens , isn't it ?",
    "[PAD] [CLS] [MASK]",
]
CONFIGS = {
    "plain": {},
    "named": {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "[PAD]"},
    "cleaning": {"clean_up_tokenization_spaces": True, "eos_token": "</s>"},
    "added": {
        "added_tokens_decoder": {
            "2": {
                "content": "<new>",
                "lstrip": True,
                "rstrip": True,
                "normalized": False,
                "single_word": False,
                "special": True,
            }
        },
        "additional_special_tokens": ["<extra_1>", "<extra_2>"],
        "add_bos_token": False,
    },
}


@pytest.fixture(scope="module")
def backends():
    return {kind: make() for kind, make in KINDS.items()}


def assert_same(ours, theirs, texts):
    assert ours.vocab_size == len(theirs)
    for name in ("bos_token", "eos_token", "pad_token"):
        assert getattr(ours, name) == getattr(theirs, name)
        assert getattr(ours, f"{name}_id") == getattr(theirs, f"{name}_id")
    for text in texts:
        for special in (True, False):
            ids = theirs.encode(text, add_special_tokens=special)
            assert ours.encode(text, special) == ids
            for skip in (True, False):
                assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert ours.encode_batch(texts) == [theirs.encode(text) for text in texts]


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("kind", KINDS)
def test_same_as_transformers(tmp_path, backends, kind, config):
    from transformers import AutoTokenizer

    folder = write_folder(tmp_path, backends[kind], **CONFIGS[config])
    assert_same(
        Tokenizer.from_folder(folder),
        AutoTokenizer.from_pretrained(folder),
        [*TEXTS, "a <new> b<extra_1>"],
    )


@pytest.mark.parametrize(
    ("kind", "tokenizer_class"),
    [
        ("gpt2", "GPT2Tokenizer"),
        ("mistral", "LlamaTokenizer"),
        ("wordpiece", "BertTokenizerFast"),
        ("llama3", "LlamaTokenizerFast"),
    ],
)
def test_same_as_the_class_that_the_folder_names(tmp_path, backends, kind, tokenizer_class):
    from transformers import AutoTokenizer

    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    if kind == "wordpiece":
        named = {"cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"}
    folder = write_folder(tmp_path, backends[kind], tokenizer_class=tokenizer_class, **named)
    theirs = AutoTokenizer.from_pretrained(folder)
    ours = Tokenizer.from_folder(folder)
    for text in CORPUS:
        ids = theirs.encode(text)
        assert ours.encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("kind", KINDS)
def test_random_text_same_as_transformers(tmp_path, backends, kind):
    from transformers import AutoTokenizer

    folder = write_folder(tmp_path, backends[kind], bos_token="<s>", eos_token="</s>")
    ours, theirs = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)

    @settings(max_examples=40, deadline=None, derandomize=True, database=None)
    @given(st.text(max_size=60))
    def check(text):
        ids = ours.encode(text)
        assert ids == theirs.encode(text)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)

    check()


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_too_long_is_cut_as_transformers_cuts_it(tmp_path, backends, kind):
    """The tokens that end every text stay; of a pair the longer text gives up its end first."""
    from transformers import AutoTokenizer

    folder = write_folder(tmp_path, backends[kind], bos_token="<s>", eos_token="</s>")
    ours, theirs = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
    short, longer = "one two three", " ".join(CORPUS)
    cut = 0
    for most in (4, 7, 8, 15, 16, 10_000):
        options = {"truncation": "longest_first", "max_length": most}
        expected = theirs([short, longer], **options)["input_ids"]
        assert ours.encode_batch([short, longer], most=most) == expected
        for pair in ((short, longer), (longer, short), (longer, longer)):
            (found,) = ours.encode_pairs([pair], most=most)
            assert found[0] == theirs(*pair, **options)["input_ids"]
            cut += len(found[0]) == most
    assert cut > 9


def test_special_tokens_map_names_tokens(tmp_path, backends):
    folder = write_folder(tmp_path, backends["llama3"])
    names = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}}
    (folder / "special_tokens_map.json").write_text(json.dumps(names))
    tokenizer = Tokenizer.from_folder(folder)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")
    assert tokenizer.eos_token_id in tokenizer.special_ids
    assert tokenizer.named_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert tokenizer.token_text(tokenizer.eos_token_id) == "</s>"
    assert tokenizer.token_text(10**6) == tokenizer.token_text(-1) == ""


def test_bos_and_eos_are_added_where_only_the_configuration_asks(tmp_path, backends):
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    asked = {"add_bos_token": True, "add_eos_token": True}
    plain = Tokenizer.from_folder(write_folder(tmp_path / "a", backends["gpt2"], **names))
    added = Tokenizer.from_folder(write_folder(tmp_path / "b", backends["gpt2"], **names, **asked))
    ids = plain.encode("hello there")
    assert added.encode("hello there") == [added.bos_token_id, *ids, added.eos_token_id]
    assert added.encode("hello there", add_special_tokens=False) == ids
    # A file that does it itself is not asked twice.
    itself = Tokenizer.from_folder(
        write_folder(tmp_path / "c", backends["llama3"], **names, **asked)
    )
    assert itself.encode("x").count(itself.bos_token_id) == 1


def test_a_saved_truncation_is_not_applied(tmp_path):
    backend = gpt2()
    backend.enable_truncation(4)
    backend.enable_padding(length=64, pad_token="<s>")
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, backend))
    assert 4 < len(tokenizer.encode("The quick brown fox jumps")) < 64


@pytest.mark.parametrize(
    ("value", "expected"),
    [(4096, 4096), (1e30, None), (10**30, None), (None, None), ("x", None), (0, None)],
)
def test_model_max_length(backends, value, expected):
    assert Tokenizer(backends["gpt2"], {"model_max_length": value}).model_max_length == expected


DEFAULT, USE, OTHER = (
    f"{name} {{{{ messages[0]['content'] }}}} {{{{ tools | length if tools else 0 }}}}"
    for name in ("default", "tool_use", "other")
)
LISTED = [{"name": "tool_use", "template": USE}, {"name": "default", "template": DEFAULT}]
# A folder's files by their names; `config` is the key of `tokenizer_config.json`.
TEMPLATE_FOLDERS = {
    "text": {"config": DEFAULT},
    "list": {"config": LISTED},
    "list, the other way round": {"config": LISTED[::-1]},
    "list with one more": {"config": [{"name": "rag", "template": OTHER}, *LISTED]},
    "list of one": {"config": LISTED[1:]},
    "object": {"config": {"tool_use": USE, "default": DEFAULT}},
    "file": {"chat_template.jinja": OTHER},
    "file and list": {"config": LISTED, "chat_template.jinja": OTHER},
    "file and folder": {
        "chat_template.jinja": DEFAULT,
        "additional_chat_templates/tool_use.jinja": USE,
    },
    "file, folder and list": {
        "config": LISTED,
        "chat_template.jinja": OTHER,
        "additional_chat_templates/tool_use.jinja": OTHER,
        "additional_chat_templates/readme.txt": USE,
    },
    "folder with a default": {
        "chat_template.jinja": OTHER,
        "additional_chat_templates/default.jinja": DEFAULT,
        "additional_chat_templates/tool.use.jinja": USE,
    },
}


@pytest.mark.parametrize("files", TEMPLATE_FOLDERS.values(), ids=TEMPLATE_FOLDERS)
def test_chat_templates_are_those_of_transformers(tmp_path, backends, files):
    from transformers import AutoTokenizer

    config = {"chat_template": files["config"]} if "config" in files else {}
    folder = write_folder(tmp_path, backends["gpt2"], **config)
    for name, text in files.items():
        if name != "config":
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(text)
    theirs = AutoTokenizer.from_pretrained(folder)
    ours = Tokenizer.from_folder(folder)
    assert ours.chat_template == theirs.chat_template
    template = load_chat_template(None, ours.chat_template, {})
    messages = [{"role": "user", "content": "q"}]
    for tools in (None, [{"type": "function", "function": {"name": "f"}}]):
        assert template.render(messages, tools=tools) == theirs.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=True
        )


def test_chat_template_sources(tmp_path, backends):
    folder = write_folder(tmp_path, backends["gpt2"], chat_template=LISTED)
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "J"}))
    assert Tokenizer.from_folder(folder).chat_template == "J"
    (folder / "chat_template.jinja").write_text("file")
    assert Tokenizer.from_folder(folder).chat_template == "file"
    assert Tokenizer(backends["gpt2"], {}).chat_template is None


@pytest.mark.parametrize("kind", KINDS)
def test_half_a_surrogate_pair_is_refused(backends, kind):
    tokenizer = Tokenizer(backends[kind], {})
    for text in ("\ud800", "a\udfff", "\udc80 b"):
        with pytest.raises(InvalidRequest, match="surrogate"):
            tokenizer.encode(text)


@pytest.mark.parametrize("ids", [[-1], [2**32], ["a"], [None]])
def test_ids_that_are_none_are_refused(backends, ids):
    with pytest.raises(InvalidRequest):
        Tokenizer(backends["gpt2"], {}).decode(ids)


def test_ids_outside_the_vocabulary_have_no_text(backends):
    assert Tokenizer(backends["gpt2"], {}).decode([10**6, 2**31]) == ""
    assert Tokenizer(backends["gpt2"], {}).decode([]) == ""
    assert Tokenizer(backends["gpt2"], {}).decode_batch([[], [10**6]]) == ["", ""]


@pytest.mark.parametrize("kind", ["llama3", "unigram", "wordpiece"])
@pytest.mark.parametrize(
    "text",
    ["a" * 10**6, "\0" * 10**5, " " * 10**6, "😀" * 125_000, "</s>" * 10**6],
    ids=["letter", "nul", "space", "emoji", "special"],
)
def test_huge_texts(backends, kind, text):
    ids = Tokenizer(backends[kind], {}).encode(text)
    assert len(ids) <= 4 * len(text) + 2


@pytest.mark.alone
async def test_a_long_text_does_not_hold_up_the_loop(backends):
    tokenizer = Tokenizer(backends["llama3"], {})
    num_turns = 0
    task = asyncio.create_task(encode_texts(tokenizer, ["😀 and words " * 80_000]))
    while not task.done():
        await asyncio.sleep(0.001)
        num_turns += 1
    assert len((await task)[0]) > 80_000
    # The encode takes about two seconds. A loop that is held up meanwhile turns once or twice.
    assert num_turns > 20
    assert await encode_texts(tokenizer, ["short"]) == [tokenizer.encode("short")]


def test_a_folder_without_a_tokenizer(tmp_path):
    with pytest.raises(StartupError, match="No tokenizer") as raised:
        Tokenizer.from_folder(tmp_path)
    assert "\n" not in raised.value.message
    (tmp_path / "tokenizer.json").write_text("{broken")
    with pytest.raises(StartupError, match=r"Cannot read .*tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


def test_older_vocabulary_files_are_converted_once(tmp_path):
    folder, cache = tmp_path / "model", tmp_path / "cache"
    folder.mkdir()
    cache.mkdir()
    gpt2().model.save(str(folder))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    path = converted_tokenizer_file(folder, cache)
    from transformers import AutoTokenizer

    expected = AutoTokenizer.from_pretrained(folder)
    before = path.stat().st_mtime_ns
    assert converted_tokenizer_file(folder, cache).stat().st_mtime_ns == before
    (folder / "tokenizer.json").write_bytes(path.read_bytes())
    ours = Tokenizer.from_folder(folder)
    for text in CORPUS:
        assert ours.encode(text) == expected.encode(text)


def test_a_vocabulary_that_cannot_be_converted_is_one_line(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"not a model")
    with pytest.raises(StartupError, match=r"No tokenizer\.json") as raised:
        converted_tokenizer_file(tmp_path, tmp_path)
    assert "\n" not in raised.value.message


def test_settings_without_a_vocabulary_are_refused_at_once(tmp_path, monkeypatch):
    # To start transformers for nothing would fail in other words.
    monkeypatch.setattr(sys, "executable", str(tmp_path / "missing"))
    for name in ("tokenizer_config.json", "special_tokens_map.json", "config.json"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(StartupError, match=r"there is no tokenizer\.json"):
        converted_tokenizer_file(tmp_path, tmp_path)


def test_torch_and_transformers_stay_out(tmp_path):
    folder = write_folder(tmp_path, wordpiece())
    code = (
        "import sys; from pathlib import Path; from runtime.text.tokenizer import Tokenizer;"
        f"Tokenizer.from_folder(Path({str(folder)!r})).encode('x');"
        "import runtime.text.detokenizer_process;"
        "print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_llama3_spelling(backends):
    tokenizer = Tokenizer(llama3(), {"eos_token": "</s>"})
    ids = tokenizer.encode(" the", add_special_tokens=False)
    assert "".join(tokenizer.token_text(i) for i in ids) == "Ġthe"
