"""Get typed answers: a Pydantic model is the schema, and an instance of it is the result.

Run `python examples/lang/json_extraction.py --url URL`.
"""

import argparse
from typing import Any

from pydantic import BaseModel, Field

import headrace as sgl

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--url", default="http://127.0.0.1:30000")


class Country(BaseModel):
    country: str = Field(max_length=20)
    capital: str = Field(max_length=20)


# Type checkers know that `state[FACTS]` is a `Country`.
FACTS = sgl.gen("facts", max_tokens=64, temperature=0, schema=Country)


@sgl.function
def extract(s: Any, text: str) -> None:
    s += sgl.user(f"Give me a JSON with country and capital. {text}")
    s += sgl.assistant(FACTS)


if __name__ == "__main__":
    sgl.set_default_backend(sgl.RuntimeEndpoint(parser.parse_args().url))
    texts = ["Tell me about Japan.", "Tell me about France.", "Tell me about Cuba."]
    for state in extract.run_batch([{"text": text} for text in texts]):
        facts = state[FACTS]
        print(f"{type(facts).__name__}: {facts.capital} is the capital of {facts.country}")
