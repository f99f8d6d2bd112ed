"""Write the model card: `python -m recipes.demo_vision.card --model DIR --score DIR/eval.json`."""

import argparse
import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from recipes.demo_vision.evaluate import table_of

_CARD = """\
---
license: apache-2.0
language: [en]
library_name: transformers
pipeline_tag: image-text-to-text
---
# The Headrace vision demo model

A **toy**: a vision-language model of {parameters:,} parameters ({size:.1f} MB) that ships with
Headrace as `demo-vision`, so that questions about a picture are answered with no download. Use it
to try the API, in examples and in tests; do not use it for anything that matters.

## What it sees
Simple drawings: circles, squares, triangles, stars, rectangles, ovals, diamonds, hexagons, hearts
and crosses in twelve colours, up to six of them; digits, numbers of two digits, capital letters
and some sixty words in one font; bar charts of two to six bars. It tells what is there, colours,
counts, places, what is beside what, the largest and the smallest, the tallest bar; it compares
two pictures. If a picture is not a drawing, it says that it sees no shape that it knows. It has
no other knowledge.

## How it was made
Architecture `Qwen2_5_VLForConditionalGeneration`: a tower of {depth} blocks of width {tower}, a
language model of {layers} layers of width {hidden}, tied embeddings, bfloat16. The tokenizer is
the demo model's, with Qwen's vision tokens. Every picture and every text was made by the
generators in `recipes/demo_vision/` of the source tree: no outside pictures, text or weights.
Trained from scratch on {device}:

    python -m recipes.demo_vision.train --out DIR --minutes {minutes:g}

{steps:,} steps, {rows:,} prompts of one or two pictures with several questions each.

Pictures are scaled to between 16 and 64 merged patches (112 x 112 to 224 x 224 pixels,
proportions kept). The chat template is laid out as Qwen2.5-VL's.

## Score
Greedy decoding on drawings that were not in training; an answer is right when it says the same as
the true one; the order of lists is ignored. Places in descriptions are scored under `place`; the
wordings of `new wordings` were not in training.

{table}

## Limits
- Photos, screenshots, other fonts and words, shapes that touch or overlap: it says something false.
- More than six shapes, or shapes smaller than a twelfth of the picture, are miscounted.
- It understands English only, and only questions like those of its recipe.

Licence: Apache-2.0.
"""


def write_card(folder: Path, result: dict[str, Any]) -> None:
    """Write `README.md` into the checkpoint's folder, from a score and the training's record."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    weights = folder / "model.safetensors"
    text = _CARD.format(
        parameters=sum(tensor.numel() for tensor in load_file(weights).values()),
        size=weights.stat().st_size / 1e6,
        depth=config["vision_config"]["depth"],
        tower=config["vision_config"]["hidden_size"],
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        table=table_of(result),
        **result["training"],
    )
    (folder / "README.md").write_text(text, encoding="utf-8")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--score", type=Path, required=True, help="eval.json of the training")
    args = parser.parse_args()
    write_card(args.model, json.loads(args.score.read_text(encoding="utf-8")))


if __name__ == "__main__":
    main()
