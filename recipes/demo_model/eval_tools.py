"""The evaluation's chats with tools: names, descriptions and values not seen in training."""

import json
from collections.abc import Iterator
from typing import Any

from recipes.demo_model import checks
from recipes.demo_model.conversation import Message, Tool
from recipes.demo_model.listing import listed

ToolCase = tuple[str, list[Message], list[Tool], checks.Check]


def tool(name: str, description: str, **parameters: str) -> Tool:
    """A declaration whose parameters are given as `name="type: description"`."""
    properties = {}
    for key, text in parameters.items():
        kind, _, about = text.partition(": ")
        properties[key] = {"type": kind, **({"description": about} if about else {})}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    function: dict[str, Any] = {"name": name, "description": description, "parameters": schema}
    return {"type": "function", "function": function}


WEATHER = tool(
    "get_weather", "Get the current weather for a location", location="string: City name"
)
SEARCH = tool("web_search", "Search the web for information", query="string: The search query")
CALCULATOR = tool("calculator", "Evaluate a math expression", expression="string")
STOCK = tool("get_stock_price", "Get the current price of a stock", ticker="string")
CITIES = listed(
    "Paris|Tokyo|Reykjavik|Ulaanbaatar|Trondheim|Valparaíso|Kraków|Gotham City|Santa Cruz|"
    "Little Rock|Fort Worth|Nantucket|Timbuktu|Zanzibar|Marrakesh|Baton Rouge|Palo Alto|Bergen",
    "|",
)
TOPICS = listed(
    "electric bicycles|quantum computers|banana bread|volcanoes in Iceland|jazz festivals|"
    "cheap laptops|vegan lasagna|Roman aqueducts|solar panels|marathon training",
    "|",
)
SUMS = listed(
    "123 * 456|98765 - 4321|17 * 23|1024 / 8|7777 + 2222|35 * 99|812 - 377|640 / 16|55 * 44|"
    "909 + 101",
    "|",
)

# Tools that are not in the training data, with a request and the expected arguments.
NEW_TOOLS: list[tuple[Tool, str, dict[str, Any]]] = [
    (tool("find_recipe", "Find a recipe for a dish", dish="string"),
     "Find a recipe for pancakes.", {"dish": "pancakes"}),
    (tool("lookup_word", "Look up the meaning of a word in the dictionary", word="string"),
     "Look up the meaning of ephemeral.", {"word": "ephemeral"}),
    (tool("get_horoscope", "Get the horoscope for a zodiac sign", sign="string"),
     "What is the horoscope for Taurus?", {"sign": "Taurus"}),
    (tool("order_pizza", "Order a pizza", topping="string: The topping"),
     "Order a pizza with mushrooms.", {"topping": "mushrooms"}),
    (tool("track_parcel", "Track a parcel by its number", number="string"),
     "Track the parcel AB1234.", {"number": "AB1234"}),
    (tool("get_air_quality", "Get the air quality of a city", city="string"),
     "What is the air quality of Lahore?", {"city": "Lahore"}),
    (tool("open_door", "Open a door", door="string"), "Open the garage door.", {"door": "garage"}),
    (tool("get_exchange_rate", "Get the exchange rate of a currency", currency="string"),
     "What is the exchange rate of the yen?", {"currency": "yen"}),
    (tool("get_lyrics", "Get the lyrics of a song", song="string"),
     "Get the lyrics of Yesterday.", {"song": "Yesterday"}),
    (tool("get_traffic", "Get the traffic of a road", road="string"),
     "Tell me the traffic of A40.", {"road": "A40"}),
]  # fmt: skip


def _user(text: str) -> list[Message]:
    return [{"role": "user", "content": text}]


def tool_cases() -> Iterator[ToolCase]:
    """Calls of one tool, calls of the right one of several, no calls, and reports."""
    for index, city in enumerate(CITIES):
        asked = ("What is the weather in {c}?", "How's the weather in {c} today?")[index % 2]
        check = checks.calls("get_weather", {"location": city})
        yield "tool call", _user(asked.format(c=city)), [WEATHER], check
        among = [SEARCH, WEATHER, STOCK] if index % 2 else [WEATHER, CALCULATOR, SEARCH]
        asked = f"Please check the weather in {city}."
        yield "right tool of several", _user(asked), among, check
    for topic in TOPICS:
        check = checks.calls("web_search", {"query": topic})
        yield "tool call", _user(f"Search for {topic}."), [SEARCH], check
        among = [WEATHER, SEARCH, CALCULATOR]
        yield "right tool of several", _user(f"Look up {topic} online."), among, check
    for expression in SUMS:
        check = checks.calls("calculator", {"expression": expression})
        yield "tool call", _user(f"What is {expression}?"), [CALCULATOR], check
        among = [CALCULATOR, WEATHER, SEARCH]
        yield "right tool of several", _user(f"Calculate {expression}"), among, check
    for declared, request, arguments in NEW_TOOLS:
        check = checks.calls(declared["function"]["name"], arguments)
        yield "unknown tool", _user(request), [declared], check
        yield "unknown tool", _user(request), [WEATHER, declared, SEARCH], check
    ordinary = [
        ("What is the capital of France?", "Paris"), ("Hello!", "help"), ("What is 2 + 3?", "5"),
        ("Who are you?", "demo model"), ("What is the opposite of hot?", "cold"),
        ("Which day comes after Friday?", "Saturday"), ("Repeat after me: plum", "plum"),
        ("What is the currency of Japan?", "yen"), ("List 3 fruits.", "3."), ("Thanks!", "welcome"),
    ]  # fmt: skip
    for question, wanted in ordinary:
        check = checks.no_call(checks.says(wanted))
        yield "no tool needed", _user(question), [WEATHER], check
        yield "no tool needed", _user(question), [WEATHER, STOCK], check
    for index, city in enumerate(CITIES):
        degrees = index * 2 - 3
        history: list[Message] = [
            *_user(f"What is the weather in {city}?"),
            {"role": "assistant", "content": None, "tool_calls": [
                {"type": "function",
                 "function": {"name": "get_weather", "arguments": {"location": city}}}]},
            {"role": "tool", "content": json.dumps({"temperature": degrees, "condition": "foggy"})},
        ]  # fmt: skip
        yield (
            "tool result",
            history,
            [WEATHER],
            checks.no_call(checks.says(str(degrees)) if index % 2 else checks.says(city)),
        )
