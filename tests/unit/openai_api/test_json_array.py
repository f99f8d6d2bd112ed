"""Forced calls come out whole, however the output is cut into pieces."""

import pytest

from openai_api.output_parser import Call, ContentText, OutputParser, WholeCalls
from openai_api.tool_parsers.json_array import JsonArrayParser

TEXT = (
    '[ {"name": "f", "parameters": {"a": "}{\\\\\\"]", "b": {"c": [1]}}},\n'
    '{"name":"g","parameters":{}}]'
)
CALLS = [
    Call(0, "f", '{"a": "}{\\\\\\"]", "b": {"c": [1]}}', True),
    Call(1, "g", "{}", True),
]
FUNCTIONS = {"f": {}, "g": {}}


def read(pieces, functions=FUNCTIONS, max_calls=None):
    parser = OutputParser(tools=JsonArrayParser(functions, max_calls=max_calls))
    events = [event for piece in pieces for event in parser.feed(piece)]
    return list(WholeCalls().feed(events + parser.finish()))


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_pieces_of_any_size(size):
    assert read([TEXT[at : at + size] for at in range(0, len(TEXT), size)]) == CALLS


def test_at_most_so_many():
    assert read([TEXT], max_calls=1) == CALLS[:1]


def test_what_is_unknown_is_text_and_what_is_cut_off_ends_there():
    for text in ('[{"name":"h","parameters":{}},', '[{"name":"f","par'):
        parts = read([text])
        assert all(isinstance(part, ContentText) for part in parts)
        assert "".join(part.text for part in parts) == text
    assert read(['[{"name":"f","parameters":{"a']) == [Call(0, "f", '{"a', False)]
