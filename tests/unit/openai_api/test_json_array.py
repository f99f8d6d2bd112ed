"""Forced calls come out whole, however the output is cut into pieces."""

import pytest

from openai_api.tool_parsers.json_array import JsonArrayParser
from openai_api.tool_parsers.tool_parser import ParsedCall

TEXT = (
    '[ {"name": "f", "parameters": {"a": "}{\\\\\\"]", "b": {"c": [1]}}},\n'
    '{"name":"g","parameters":{}}]'
)
CALLS = [ParsedCall("f", '{"a":"}{\\\\\\"]","b":{"c":[1]}}'), ParsedCall("g", "{}")]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_pieces_of_any_size(size):
    parser = JsonArrayParser(["f", "g"], max_calls=None)
    out = []
    for begin in range(0, len(TEXT), size):
        out += parser.feed(TEXT[begin : begin + size])
    assert out + parser.finish() == CALLS


def test_at_most_so_many():
    parser = JsonArrayParser(["f", "g"], max_calls=1)
    assert parser.feed(TEXT) + parser.finish() == CALLS[:1]


def test_what_is_cut_off_or_unknown_is_text():
    parser = JsonArrayParser(["f"], max_calls=None)
    assert parser.feed('[{"name":"h","parameters":{}},{"name":"f","par') == [
        '{"name":"h","parameters":{}}'
    ]
    assert parser.finish() == ['{"name":"f","par']
