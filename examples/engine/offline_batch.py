"""Run a batch of prompts without a server; all options of the server are accepted.

Run `python examples/engine/offline_batch.py --model-path DIR --dtype bfloat16`.
"""

import argparse
import dataclasses

import headrace as sgl
from headrace.srt.server_args import ServerArgs


def main(server_args: ServerArgs) -> None:
    prompts = [
        "Hello, my name is",
        "The president of the United States is",
        "The capital of France is",
        "The future of AI is",
    ]
    sampling_params = {"temperature": 0.8, "top_p": 0.95}
    with sgl.Engine(**dataclasses.asdict(server_args)) as llm:
        for prompt, output in zip(prompts, llm.generate(prompts, sampling_params), strict=True):
            print("===============================")
            print(f"Prompt: {prompt}\nGenerated text: {output['text']}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    main(ServerArgs.from_cli_args(parser.parse_args()))
