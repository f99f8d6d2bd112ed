"""Ask about a PIL image without a server.

Run `python examples/vision/engine.py --model-path DIR`.
"""

import argparse
from pathlib import Path

from PIL import Image

import headrace as sgl

QUESTIONS = ("What is in the image?", "What colour is the circle?", "How many squares are there?")


def prompt(question: str) -> str:
    return (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        f"<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>{question}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-path", default="demo-vision")
    parser.add_argument("--image", type=Path, default=Path(__file__).parent / "drawing.png")
    options = parser.parse_args()
    picture = Image.open(options.image)
    with sgl.Engine(model_path=options.model_path) as engine:
        # One picture for all prompts; a list would need one entry for each.
        answers = engine.generate(
            [prompt(question) for question in QUESTIONS],
            {"temperature": 0, "max_new_tokens": 32},
            image_data=picture,
        )
    for question, answer in zip(QUESTIONS, answers, strict=True):
        print(question, answer["text"])


if __name__ == "__main__":
    main()
