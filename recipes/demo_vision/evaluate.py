"""Score a checkpoint on unseen drawings with greedy decoding.

`python -m recipes.demo_vision.evaluate --model DIR [--cases 150] [--device cuda] [--json FILE]`.
"""

import argparse
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from recipes.demo_vision.draw import Pixels, draw, prepare
from recipes.demo_vision.feed import to_batch
from recipes.demo_vision.network import VisionNetwork
from recipes.demo_vision.pairs import about_two
from recipes.demo_vision.questions import Asked, about
from recipes.demo_vision.rows import ONE, TWO, RowWriter
from recipes.demo_vision.scenes import random_scene
from recipes.demo_vision.shape import (
    END_OF_TEXT,
    END_OF_TURN,
    VisionShape,
    token_id,
    vision_tokenizer,
)
from recipes.demo_vision.talk import without_image

MAX_NEW_TOKENS = 64
NEW_WORDING = "new wordings"
ALL_KINDS = frozenset((
    "what", "describe", "colour", "shape", "count", "yes or no", "not there", "place", "beside",
    "size", "background", "digit", "number", "letter", "word", "colour of text", "bars",
    "tallest bar", "colour of a bar", "kind", "no drawing", "one of two", "both", "same",
    "count in one", "more", "which one", "talk", "no image", "unknown", NEW_WORDING,
))  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One question to score: its kind in the score, the pictures, the question and its answer."""

    kind: str
    pictures: tuple[Pixels, ...]
    asked: Asked


def _stream(rng: Random) -> Iterator[Case]:
    """Cases in random order, several for each drawing."""
    while True:
        scene = random_scene(rng)
        pixels = prepare(draw(scene))
        questions = about(rng, scene, pixels)
        for _ in range(4):
            asked = next(questions)
            yield Case(asked.kind.split(",")[0], (pixels,), asked)
        new = next(about(rng, scene, pixels, held_out=True))
        yield Case(NEW_WORDING, (pixels,), new)
        if rng.random() < 0.5:
            scenes = (random_scene(rng, small=True), random_scene(rng, small=True))
            both = (prepare(draw(scenes[0])), prepare(draw(scenes[1])))
            pairs = about_two(rng, scenes, both)
            for _ in range(3):
                asked = next(pairs)
                yield Case(asked.kind, both, asked)
        if rng.random() < 0.5:
            asked = without_image(rng)
            yield Case(asked.kind, (), asked)


def all_cases(seed: int, of_each: int) -> list[Case]:
    """Cases, the same number of every kind."""
    stream = _stream(Random(f"held out {seed}"))
    left = dict.fromkeys(ALL_KINDS, of_each)
    found = []
    while left:
        case = next(stream)
        if left.get(case.kind):
            found.append(case)
            left[case.kind] -= 1
            if not left[case.kind]:
                del left[case.kind]
    return found


def _facts(text: str) -> list[str]:
    """The parts of an answer, unordered, without places and shares of soft colours."""
    text = re.sub(r" at the [a-z ]+?(?=,| and |\.|$)", "", text) if " on a" in text else text
    text = text.split(", mostly")[0].strip().rstrip(".")
    return sorted(re.split(r", | and |\. |: ", text.replace("The image shows ", "")))


def is_right(case: Case, said: str) -> bool:
    """Whether an answer says what the true one says; the order of a list is ignored."""
    wanted = case.asked.answer
    return said.strip() == wanted or _facts(said) == _facts(wanted)


@torch.inference_mode()
def generate(
    network: VisionNetwork, tokenizer: Tokenizer, cases: list[Case], window: int, device: str
) -> list[str]:
    """The greedy answers, in batches of equal layout."""
    writers = [RowWriter(tokenizer, layout, window) for layout in (ONE, TWO)]
    stops = (token_id(tokenizer, END_OF_TURN), token_id(tokenizer, END_OF_TEXT))
    answers = [""] * len(cases)
    size = 256 if device == "cuda" else 16
    for which, writer in enumerate(writers):
        chosen = [i for i, case in enumerate(cases) if (len(case.pictures) > 1) == bool(which)]
        for begin in range(0, len(chosen), size):
            part = chosen[begin : begin + size]
            rows = []
            for index in part:
                row = writer.empty()
                case = cases[index]
                writer.write(row, case.pictures, [case.asked], prompt_only=True)
                rows.append(row)
            batch = to_batch(rows, device)
            end = (batch["segment"] != 255).sum(1)
            seen = network.see(batch)
            here = torch.arange(len(part), device=device)
            said: list[torch.Tensor] = []
            ended = torch.zeros(len(part), dtype=torch.bool, device=device)
            for _ in range(MAX_NEW_TOKENS):
                hidden = network(batch, seen)[here, end - 1]
                token = network.logits(hidden).argmax(-1)
                said.append(token)
                ended |= torch.isin(token, torch.tensor(stops, device=device))
                if bool(ended.all()):
                    break
                batch["ids"][here, end] = token.to(torch.int16)
                batch["segment"][here, end] = batch["segment"][here, end - 1]
                batch["position"][here, :, end] = batch["position"][here, :, end - 1] + 1
                end = end + 1
            for number, index in enumerate(part):
                ids = [int(token[number]) for token in said]
                cut = next((i for i, one in enumerate(ids) if one in stops), len(ids))
                answers[index] = tokenizer.decode(ids[:cut])
    return answers


def score(
    network: VisionNetwork, tokenizer: Tokenizer, cases: list[Case], window: int, device: str
) -> dict[str, Any]:
    """Right answers and totals by kind, some failures, and some sample answers."""
    kinds: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    failures: list[dict[str, str]] = []
    kept: dict[str, int] = defaultdict(int)
    answers = generate(network, tokenizer, cases, window, device)
    for case, said in zip(cases, answers, strict=True):
        right = is_right(case, said)
        kinds[case.kind][0] += right
        kinds[case.kind][1] += 1
        kept[case.kind] += not right
        if not right and kept[case.kind] <= 12:
            shown = {"kind": case.kind, "question": case.asked.question}
            failures.append({**shown, "wanted": case.asked.answer, "said": said})
    total = [sum(pair[index] for pair in kinds.values()) for index in (0, 1)]
    table = {name: {"right": kinds[name][0], "of": kinds[name][1]} for name in sorted(kinds)}
    return {"kinds": table, "right": total[0], "of": total[1], "failures": failures}


def table_of(result: dict[str, Any]) -> str:
    """The score as a Markdown table."""
    lines = ["| kind | right | of | |", "|---|--:|--:|--:|"]
    for name, row in [*result["kinds"].items(), ("all", result)]:
        share = 100 * row["right"] / row["of"]
        lines.append(f"| {name} | {row['right']} | {row['of']} | {share:.1f}% |")
    return "\n".join(lines)


def load_network(folder: Path, shape: VisionShape, device: str) -> VisionNetwork:
    """The training network with a checkpoint's weights; bfloat16 arithmetic on a GPU."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    network = VisionNetwork(shape, dtype)
    network.load_checkpoint(load_file(folder / "model.safetensors"))
    network.to(device).eval()
    # Angles and the pixels' means stay in float32.
    for parameter in network.parameters():
        parameter.data = parameter.data.to(dtype)
    return network


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--cases", type=int, default=150, help="of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", default="", help="where to write the score")
    args = parser.parse_args()
    shape = VisionShape()
    network = load_network(args.model, shape, args.device)
    cases = all_cases(args.seed, args.cases)
    result = score(network, vision_tokenizer(), cases, shape.window, args.device)
    print(table_of(result))
    for failure in result["failures"]:
        print(f"- {failure['kind']}: {failure['question']!r} -> {failure['said']!r},"
              f" wanted {failure['wanted']!r}")  # fmt: skip
    if args.json:
        text = json.dumps(result, indent=1, ensure_ascii=False)
        Path(args.json).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
