"""Write the model card: `python -m recipes.demo_model.card --score score.json`."""

import argparse
import json
from pathlib import Path

from headrace.demo import MODEL_PATH
from recipes.demo_model.evaluate import table_of

_CARD = """\
---
license: apache-2.0
language: [en]
library_name: transformers
pipeline_tag: text-generation
---
# The Headrace demo model

A **toy**: a language model of {parameters:,} parameters ({size:.1f} MB) that ships with Headrace,
so that a server answers with no download. Use it to try the API, in examples and in tests; do not
use it for anything that matters.

## What it does
Capitals and a few facts of countries, sums and differences of small numbers, products up to
12 x 12, days and months, numbered lists, JSON answers, tool calls in the Hermes/Qwen form,
short thoughts inside `<think>` when thinking is on, small talk, a few definitions, stories and
haiku, and raw completion of simple sentences. To some other questions it says that it is a tiny
demo model and does not know; to many it says something false or meaningless.

## How it was made
Architecture `Qwen3ForCausalLM`: {layers} layers, hidden size {hidden}, {heads} query heads and
{kv_heads} key-value heads of {head_dim}, MLP {mlp}, tied embeddings, {vocab} ids, bfloat16. The
tokenizer is a byte-level BPE with single digits. Everything it read was written by the generators
in `recipes/demo_model/tasks/` of the source tree: no outside text, no outside weights. Trained from
scratch on one H200:

    python -m recipes.demo_model.train --out DIR --minutes {minutes} --workers 14

Loss is taken on the assistant's turns of chats and on all of plain text. Sequences reach 2,048
tokens, most are under 200.

## Chat template
ChatML as in Qwen3. Thinking is off unless the template gets `enable_thinking=true`; off, the
generation prompt holds an empty think block; on, the system turn ends in `/think` and the model
writes the block itself. Prompts that clients write by hand, without the empty block, get a direct
answer too. Tools, `tool` messages and `tool_calls` are rendered as in Qwen3.

## Score
Greedy decoding; `python -m recipes.demo_model.evaluate --model headrace/demo/model`. Phrasings
marked new, two-digit pairs marked unseen, words to copy and spell, and unknown tools are not in the
training text. Capitals and other facts are memorised.

{table}

## Limits
- It knows nothing beyond its generators, and states false things with confidence: "How many legs
  does a cat have?" was never in its text, and gets no sensible answer.
- A request far from its text can even get a tool call although no tool was offered.
- It reports the results of tools well when they look like those of its text (temperature and
  condition, a number, a sentence), badly otherwise.
- Common words (banana) may be misspelled, because they are single tokens.
- It understands English only, and only simple requests; other scripts it can at most repeat.
- Numbers of three digits and more, long words and long conversations are unreliable.
- Populations are rounded; where a country has several capitals or languages it names one.

Licence: Apache-2.0.
"""


def write_card(folder: Path, score: Path, minutes: str) -> None:
    """Write `README.md` into the checkpoint's folder."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    size = (folder / "model.safetensors").stat().st_size
    hidden, dim = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    layer = 2 * hidden * (queries + keys) + 3 * hidden * config["intermediate_size"]
    layer += 2 * hidden + 2 * dim
    parameters = config["vocab_size"] * hidden + config["num_hidden_layers"] * layer + hidden
    text = _CARD.format(
        parameters=parameters,
        size=size / 1e6,
        layers=config["num_hidden_layers"],
        hidden=hidden,
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=dim,
        mlp=config["intermediate_size"],
        vocab=config["vocab_size"],
        minutes=minutes,
        table=table_of(json.loads(score.read_text(encoding="utf-8"))),
    )
    (folder / "README.md").write_text(text, encoding="utf-8")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=MODEL_PATH, help="folder of the checkpoint")
    parser.add_argument("--score", type=Path, required=True, help="JSON written by evaluate")
    parser.add_argument("--minutes", default="8.2", help="the training time to state")
    args = parser.parse_args()
    write_card(args.model, args.score, args.minutes)


if __name__ == "__main__":
    main()
