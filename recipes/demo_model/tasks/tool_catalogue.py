"""Tools that a chat may offer: well-known ones written out, others composed of words."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from recipes.demo_model.conversation import Tool
from recipes.demo_model.lexicon import WORDS, any_word
from recipes.demo_model.listing import listed
from recipes.demo_model.phrasing import literal, made_up_word, unicode_text
from recipes.demo_model.words import LISTS, NAMES, OBJECTS, PLACES


@dataclass(frozen=True)
class Slot:
    """One parameter: its possible names, and how a value is drawn."""

    key: str
    names: tuple[str, ...]
    description: str
    draw: Callable[[Random], Any]
    type: str = "string"
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Skill:
    """A tool with the requests that call for it. A request names the slots that it fills."""

    names: tuple[str, ...]
    descriptions: tuple[str, ...]
    slots: tuple[Slot, ...]
    requests: tuple[str, ...]
    result: Callable[[Random, dict[str, Any]], tuple[str, str]] | None = None
    """Draws what the tool returned and the sentence that reports it."""


def place(rng: Random) -> str:
    """A city, sometimes one that does not exist."""
    roll = rng.random()
    if roll < 0.5:
        return rng.choice(PLACES)
    if roll < 0.55:
        return unicode_text(rng)
    name = made_up_word(rng).capitalize()
    if roll < 0.6:
        at = rng.randrange(1, len(name))
        name = name[:at] + rng.choice("áéíóúñçãöüßøåłķ") + name[at:]
    return name if roll < 0.85 else f"{name} {made_up_word(rng).capitalize()}"


def topic(rng: Random) -> str:
    """Something to search for."""
    kind = rng.randrange(4)
    if kind == 0:
        joined = [any_word(rng) for _ in range(rng.randint(1, 4))]
        if len(joined) == 3 and rng.random() < 0.5:
            joined[1] = rng.choice(["in", "of", "for", "with", "on"])
        if rng.random() < 0.3:
            joined[-1] = joined[-1].capitalize()
        return " ".join(joined)
    if kind == 1:
        return f"{any_word(rng)} {rng.choice(['news', 'prices', 'reviews', 'recipes'])}"
    if kind == 2:
        return rng.choice([*LISTS["programming languages"], *LISTS["sports"], *PLACES])
    return literal(rng)


def person(rng: Random) -> str:
    """A first name, sometimes an unusual one."""
    return rng.choice(NAMES) if rng.random() < 0.6 else made_up_word(rng).capitalize()


def expression(rng: Random) -> str:
    """An arithmetic expression."""
    sign = rng.choice("+-**/")
    text = f"{rng.randint(1, 9999)} {sign} {rng.randint(1, 9999)}"
    return text if rng.random() < 0.8 else f"({text}) {rng.choice('+-*')} {rng.randint(1, 99)}"


def message(rng: Random) -> str:
    """A short message to another person."""
    return rng.choice(
        ["I will be late", "see you tomorrow", "happy birthday", "the meeting is at noon",
         "please call me back", "dinner is ready", literal(rng)]
    )  # fmt: skip


def _weather(rng: Random, args: dict[str, Any]) -> tuple[str, str]:
    degrees, sky = rng.randint(-10, 38), rng.choice(["sunny", "cloudy", "rainy", "windy", "clear"])
    where = next(iter(args.values()))
    style = rng.randrange(3)
    if style == 0:
        return f'{{"temperature": {degrees}, "condition": "{sky}"}}', (
            f"It is {sky} in {where}, with a temperature of {degrees} degrees."
        )
    if style == 1:
        return f"{degrees} degrees, {sky}", (
            f"It is {sky} in {where}, with a temperature of {degrees} degrees."
        )
    return sky, f"It is {sky} in {where}."


def _number(rng: Random, _args: dict[str, Any]) -> tuple[str, str]:
    value = rng.randint(0, 99999)
    shown = str(value) if rng.random() < 0.6 else f'{{"result": {value}}}'
    return shown, f"The result is {value}."


def _found(rng: Random, args: dict[str, Any]) -> tuple[str, str]:
    what = next(iter(args.values()))
    text = rng.choice(
        [f"{what} is a {rng.choice(OBJECTS)} in {rng.choice(PLACES)}.",
         f"{what} was found in {rng.randint(1500, 2025)}.",
         f"{person(rng)} knows about {what}."]
    )  # fmt: skip
    shown = text if rng.random() < 0.6 else f'{{"result": "{text}"}}'
    return shown, f"I found this: {text}"


def _time(rng: Random, args: dict[str, Any]) -> tuple[str, str]:
    clock = f"{rng.randrange(24):02d}:{rng.randrange(60):02d}"
    where = next(iter(args.values()))
    shown = clock if rng.random() < 0.5 else f'{{"time": "{clock}"}}'
    return shown, f"It is {clock} in {where}."


def _done(rng: Random, _args: dict[str, Any]) -> tuple[str, str]:
    return rng.choice(["ok", "done", '{"status": "ok"}', '{"success": true}']), "Done."


_CITY = Slot("city", ("city", "location", "city", "place", "town"), "The name of the city", place)
_UNIT = Slot(
    "unit", ("unit", "units"), "The temperature unit", lambda rng: rng.choice(
        ["celsius", "fahrenheit"]), choices=("celsius", "fahrenheit")
)  # fmt: skip
_NUMBERS = tuple(
    Slot(a, (a, x, first), f"The {first} number", lambda rng: rng.randint(0, 999), "integer")
    for a, x, first in (("a", "x", "first"), ("b", "y", "second"))
)
_QUERY = Slot(
    "query", ("query", "q", "keywords", "text", "search_query"), "What to look for", topic
)

WEATHER = Skill(
    ("get_weather", "get_current_weather", "weather", "current_weather", "fetch_weather",
     "getWeather", "weather_lookup"),
    ("Get the current weather for a city", "Get the current weather in a given location",
     "Get the weather", "Returns the weather of a city", "Look up the weather forecast"),
    (_CITY, _UNIT),
    ("What is the weather in {city}?", "What's the weather like in {city}?",
     "What is the weather like in {city} today?", "How is the weather in {city}?",
     "Tell me the weather in {city}.", "Weather in {city}", "Is it raining in {city}?",
     "Will it rain in {city} tomorrow?", "How hot is it in {city}?",
     "What is the temperature in {city}?", "What's the weather in {city} right now?",
     "What is the weather in {city} in {unit}?", "What's the temperature in {city} in {unit}?",
     "Can you tell me the weather in {city}, in {unit}?", "Do I need an umbrella in {city}?",
     "Can you check the weather in {city} for me?", "Give me the {unit} temperature in {city}.",
     "I am going to {city}. How is the weather there?"),
    _weather,
)  # fmt: skip
SEARCH = Skill(
    ("search", "web_search", "search_web", "google_search", "search_engine", "internet_search"),
    ("Search the web", "Search the internet for information", "Look up information on the web",
     "Find web pages about a topic", "Search for information"),
    (_QUERY,),
    ("Search for {query}", "Search the web for {query}.", "Look up {query}.",
     "Find information about {query}.", "Can you search for {query}?", "Google {query}",
     "Find out about {query} on the internet.", "Search {query}", "Please look up {query}.",
     "What does the web say about {query}?", "Search the internet for {query}."),
    _found,
)  # fmt: skip
CALCULATOR = Skill(
    ("calculator", "calculate", "compute", "evaluate", "math", "calc"),
    ("Evaluate an arithmetic expression", "Calculate the result of a math expression",
     "A calculator for arithmetic", "Do math", "Compute the value of an expression"),
    (Slot("expression", ("expression", "expr", "input", "formula", "equation"),
          "The expression to evaluate", expression),),
    ("What is {expression}?", "Calculate {expression}.", "Compute {expression}",
     "How much is {expression}?", "Use the calculator to compute {expression}.",
     "Can you calculate {expression}?", "Evaluate {expression}", "{expression} = ?",
     "What's {expression}?"),
    _number,
)  # fmt: skip
_OTHERS = (
    Skill(
        ("get_time", "get_current_time", "current_time", "time_in"),
        ("Get the current time in a city", "Tell the time at a place", "Current local time"),
        (Slot("city", ("city", "timezone", "location", "place"), "The place", place),),
        ("What time is it in {city}?", "Tell me the time in {city}.", "Current time in {city}",
         "What is the time in {city} now?"),
        _time,
    ),
    Skill(
        ("send_email", "email", "send_mail"),
        ("Send an email to somebody", "Send an email"),
        (Slot("to", ("to", "recipient", "address"), "Who gets it", person),
         Slot("body", ("body", "message", "text", "content"), "What it says", message)),
        ("Send an email to {to} saying {body}", "Email {to}: {body}",
         "Write an email to {to} that says {body}"),
        _done,
    ),
    Skill(
        ("send_message", "message", "text_message"),
        ("Send a text message to a contact", "Send a message"),
        (Slot("to", ("to", "recipient", "contact", "name"), "Who gets it", person),
         Slot("body", ("message", "text", "body"), "What it says", message)),
        ("Send a message to {to}: {body}", "Tell {to} that {body}", "Text {to} {body}",
         "Message {to} saying {body}"),
        _done,
    ),
    Skill(
        ("translate", "translate_text", "translation"),
        ("Translate text into another language", "Translate a text"),
        (Slot("text", ("text", "phrase", "input"), "What to translate", topic),
         Slot("language", ("language", "target_language", "to", "target"), "The language",
              lambda rng: rng.choice(LISTS["languages"]))),
        ("Translate {text} to {language}.", "Translate '{text}' into {language}",
         "How do you say {text} in {language}?"),
        None,
    ),
    Skill(
        ("set_timer", "start_timer", "timer"),
        ("Set a timer", "Start a countdown timer"),
        (Slot("minutes", ("minutes", "duration", "duration_minutes"), "How long, in minutes",
              lambda rng: rng.randint(1, 120), "integer"),),
        ("Set a timer for {minutes} minutes.", "Start a {minutes} minute timer",
         "Timer for {minutes} minutes, please."),
        _done,
    ),
    Skill(
        ("add", "add_numbers", "sum"),
        ("Add two numbers", "Compute the sum of two numbers"),
        _NUMBERS,
        ("Add {a} and {b}.", "What is {a} + {b}?", "Compute ({a}+{b})", "Compute {a} + {b}",
         "What is the sum of {a} and {b}?", "{a} plus {b}"),
        _number,
    ),
    Skill(
        ("multiply", "multiply_numbers", "product"),
        ("Multiply two numbers", "Compute the product of two numbers"),
        _NUMBERS,
        ("Multiply {a} and {b}.", "What is {a} * {b}?", "Multiply {a} by {b}", "{a} times {b}"),
        _number,
    ),
    Skill(
        ("play_music", "play_song", "play"),
        ("Play a song", "Play music by name"),
        (Slot("song", ("song", "title", "track", "name"), "The song", topic),),
        ("Play {song}.", "I want to hear {song}", "Play the song {song}", "Put on {song}"),
        _done,
    ),
    Skill(
        ("book_flight", "find_flights", "search_flights"),
        ("Find flights between two cities", "Search for flights"),
        (Slot("origin", ("origin", "from", "departure", "from_city"), "Where it starts", place),
         Slot("destination", ("destination", "to", "arrival", "to_city"), "Where it ends", place)),
        ("Find a flight from {origin} to {destination}.", "Flights from {origin} to {destination}",
         "I want to fly from {origin} to {destination}.",
         "Book a flight from {origin} to {destination}"),
        None,
    ),
    Skill(
        ("get_stock_price", "stock_price", "get_quote"),
        ("Get the stock price of a company", "Look up a stock price"),
        (Slot("symbol", ("symbol", "ticker", "company"), "The company or its symbol", literal),),
        ("What is the stock price of {symbol}?", "How much is {symbol} stock?",
         "Stock price of {symbol}", "Get the price of {symbol} stock."),
        None,
    ),
    Skill(
        ("create_reminder", "set_reminder", "remind_me"),
        ("Create a reminder", "Remind the user of something"),
        (Slot("text", ("text", "task", "reminder", "title"), "What to remember", topic),),
        ("Remind me about {text}.", "Set a reminder: {text}", "Create a reminder for {text}"),
        _done,
    ),
    Skill(
        ("turn_on_light", "light_on", "switch_on"),
        ("Turn on the light in a room", "Switch on a light"),
        (Slot("room", ("room", "location", "area"), "The room",
              lambda rng: rng.choice(["kitchen", "bedroom", "bathroom", "garage", "office",
                                      "living room", "hall", made_up_word(rng)])),),
        ("Turn on the light in the {room}.", "Switch on the {room} light", "Light on in {room}"),
        _done,
    ),
)  # fmt: skip

# Weather with separate city and state, as in a well-known example of another server.
_STATES = ("CA", "NY", "TX", "MA", "WA", "IL", "FL", "GA", "CO", "OR")
CITY_AND_STATE = Skill(
    ("get_current_weather", "get_weather"),
    ("Get the current weather in a given location",),
    (Slot("city", ("city",), "The city to find the weather for", place),
     Slot("state", ("state",), "The two-letter abbreviation of the state",
          lambda rng: rng.choice(_STATES)),
     _UNIT),
    ("What is the weather in {city}, {state}?", "What's the weather like in {city}, {state}?",
     "What is the weather in {city}, {state} in {unit}?",
     "What's the temperature in {city}, {state}, in {unit}?"),
    _weather,
)  # fmt: skip

_THINGS = listed(
    "product order user train flight restaurant book movie package customer invoice ticket hotel "
    "recipe file project device account student employee patient shop museum game team player "
    "song server printer car building street river animal plant event course company word",
)
_PROPERTIES = listed(
    "price|status|address|rating|schedule|phone number|menu|distance|balance|score|population|"
    "definition|owner|size|weight|color|name|age|location|history|capacity|deadline|manager|stock",
    "|",
)
_VERBS = listed(
    "create delete open close start stop find show update cancel buy sell print scan order track "
    "book reserve pay call rent lock unlock clean paint cook measure convert download upload "
    "watch read draw check schedule rename share archive publish repair wash feed water invite "
    "block mute record compare count sort install",
)


def _parameter(rng: Random, *near: str) -> tuple[str, ...]:
    """One name for a parameter: related to the tool's words, or any word."""
    if rng.random() < 0.35:
        return (rng.choice(WORDS),)
    return (rng.choice([*near, "name", "id", "value", "target", "item"]),)


def _camel(name: str) -> str:
    head, *rest = name.split("_")
    return head + "".join(part.capitalize() for part in rest)


def made_up(rng: Random) -> Skill:
    """A tool composed of a verb or a property and a thing."""
    thing = rng.choice(_THINGS) if rng.random() < 0.4 else any_word(rng)
    a = "an" if thing[0] in "aeiou" else "a"
    slot = Slot(
        "x", _parameter(rng, thing, f"{thing}_name", f"{thing}_id"), f"The {thing}", literal
    )
    kind = rng.random()
    if kind < 0.45:
        noun = rng.choice(_PROPERTIES) if rng.random() < 0.5 else any_word(rng)
        if rng.random() < 0.1:
            noun += " " + any_word(rng)
        joined = noun.replace(" ", "_")
        names: tuple[str, ...] = (
            f"get_{thing}_{joined}",
            f"{thing}_{joined}",
            f"fetch_{joined}",
            f"get_{joined}",
            f"lookup_{thing}_{joined}",
            f"lookup_{joined}",
            f"find_{joined}",
        )
        descriptions: tuple[str, ...] = (
            f"Get the {noun} of {a} {thing}",
            f"Look up the {noun} of {a} {thing}",
            f"Returns a {thing}'s {noun}",
            f"Get the {noun} for {a} {thing}",
            f"Get the {noun}",
        )
        requests: tuple[str, ...] = (
            f"What is the {noun} of {{x}}?",
            f"Get the {noun} of {{x}}.",
            f"Tell me the {noun} of the {thing} {{x}}.",
            f"Show me the {noun} for {{x}}.",
            f"I need the {noun} of {{x}}",
            f"What's the {noun} of the {thing} {{x}}?",
            f"Look up the {noun} of {{x}}.",
            f"What is the {noun} for {{x}}?",
            f"Can you find the {noun} of {{x}}?",
            f"{{x}} {noun}",
        )
    elif kind < 0.75:
        verb = rng.choice(_VERBS) if rng.random() < 0.75 else any_word(rng)
        names = (f"{verb}_{thing}", f"{verb}_a_{thing}", f"{thing}_{verb}", f"do_{verb}")
        descriptions = (
            f"{verb.capitalize()} {a} {thing}",
            f"{verb.capitalize()}s the given {thing}",
            f"{verb.capitalize()} the {thing} with the given name",
        )
        requests = (
            f"{verb.capitalize()} the {thing} {{x}}.",
            f"Please {verb} the {thing} {{x}}.",
            f"Can you {verb} the {thing} called {{x}}?",
            f"I want to {verb} the {thing} {{x}}",
            f"{verb.capitalize()} the {{x}} {thing}.",
            f"{verb} {thing} {{x}}",
        )
    else:
        verb = rng.choice(_VERBS) if rng.random() < 0.75 else any_word(rng)
        link = rng.choice(["for", "with", "to", "from", "about", "in"])
        names = (f"{verb}_{thing}", f"{verb}_{thing}_{link}", f"{thing}_{verb}")
        descriptions = (
            f"{verb.capitalize()} {a} {thing} {link} something",
            f"{verb.capitalize()} {a} {thing}",
        )
        requests = (
            f"{verb.capitalize()} {a} {thing} {link} {{x}}.",
            f"Please {verb} {a} {thing} {link} {{x}}.",
            f"I want {a} {thing} {link} {{x}}.",
            f"Can you {verb} {a} {thing} {link} {{x}}?",
        )
    if rng.random() < 0.1:
        names = tuple(_camel(name) for name in names)
    return Skill(names, descriptions, (slot,), requests)


def pick(rng: Random) -> Skill:
    """A tool; the three best known ones come up more often."""
    kind = rng.random()
    if kind < 0.17:
        return WEATHER
    if kind < 0.27:
        return SEARCH
    if kind < 0.34:
        return CALCULATOR
    if kind < 0.37:
        return CITY_AND_STATE
    return rng.choice(_OTHERS) if kind < 0.58 else made_up(rng)


def declare(rng: Random, skill: Skill, needed: set[str]) -> tuple[Tool, dict[str, str]]:
    """The tool's JSON declaration, and the parameter name chosen for each slot."""
    slots = [slot for slot in skill.slots if slot.key in needed or rng.random() < 0.6]
    slots = slots or [skill.slots[0]]
    names = {slot.key: rng.choice(slot.names) for slot in slots}
    if len(slots) == 1 and rng.random() < 0.15:
        names = {slots[0].key: rng.choice(WORDS)}
    properties: dict[str, Any] = {}
    for slot in slots:
        entry: dict[str, Any] = {"type": slot.type}
        if rng.random() < 0.7:
            entry["description"] = slot.description
        if slot.choices:
            entry["enum"] = list(slot.choices)
        properties[names[slot.key]] = entry
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if rng.random() < 0.8:
        parameters["required"] = [names[slot.key] for slot in slots if not slot.choices]
    name = rng.choice(skill.names)
    if rng.random() < 0.08:
        name = made_up_word(rng)
    function: Tool = {"name": name, "description": rng.choice(skill.descriptions)}
    function["parameters"] = parameters
    if rng.random() < 0.1:
        function = {key: function[key] for key in sorted(function)}
    return ({"type": "function", "function": function} if rng.random() < 0.9 else function), names
