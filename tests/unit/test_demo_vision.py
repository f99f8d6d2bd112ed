"""The vision demo model is what its recipe writes, and answers held-out drawings."""

import json
import re
from pathlib import Path

from headrace.demo import VISION_MODEL_PATH
from recipes.demo_vision.card import write_card
from recipes.demo_vision.evaluate import all_cases, load_network, score
from recipes.demo_vision.shape import (
    TEMPLATE_PATH,
    VisionShape,
    config_json,
    generation_json,
    preprocessor_json,
    tokenizer_json,
    vision_tokenizer,
)

# The kinds that the documents and the examples ask for.
ASKED = ("what", "colour", "count")


def test_the_folder_is_what_the_recipe_writes() -> None:
    shape, tokenizer = VisionShape(), vision_tokenizer()
    template = TEMPLATE_PATH.read_text()
    wanted = {
        "config.json": config_json(shape, tokenizer),
        "generation_config.json": generation_json(tokenizer),
        "preprocessor_config.json": preprocessor_json(),
        "tokenizer_config.json": tokenizer_json(template, shape.max_position_embeddings),
        "tokenizer.json": json.loads(tokenizer.to_str()),
    }
    for name, content in wanted.items():
        assert json.loads((VISION_MODEL_PATH / name).read_text()) == content, name
    assert (VISION_MODEL_PATH / "chat_template.jinja").read_text() == template
    assert sum(path.stat().st_size for path in VISION_MODEL_PATH.iterdir()) <= 10_000_000


def test_the_card_is_what_the_recipe_writes(tmp_path: Path) -> None:
    card = (VISION_MODEL_PATH / "README.md").read_text()
    rows = re.findall(r"^\| (.+?) \| (\d+) \| (\d+) \|", card, re.MULTILINE)
    kinds = {name: {"right": int(right), "of": int(of)} for name, right, of in rows}
    device, minutes, steps, seen = re.findall(
        r"from scratch on ([^:]+):.*--minutes ([\d.]+)\n\n([\d,]+) steps, ([\d,]+) prompts",
        card,
        re.DOTALL,
    )[0]
    training = {
        "device": device,
        "minutes": float(minutes),
        "steps": int(steps.replace(",", "")),
        "rows": int(seen.replace(",", "")),
    }
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(VISION_MODEL_PATH / name)
    write_card(tmp_path, {**kinds.pop("all"), "kinds": kinds, "training": training})
    assert (tmp_path / "README.md").read_text() == card
    for kind in ASKED:
        assert kinds[kind]["right"] >= 0.9 * kinds[kind]["of"]


def test_it_answers_what_it_has_not_seen() -> None:
    shape = VisionShape()
    network = load_network(VISION_MODEL_PATH, shape, "cpu")
    cases = [case for case in all_cases(11, 10) if case.kind in ASKED]
    result = score(network, vision_tokenizer(), cases, shape.window, "cpu")
    for kind in ASKED:
        assert result["kinds"][kind]["right"] >= 9, result["failures"]
