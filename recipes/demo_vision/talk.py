"""Chats without a picture, and questions that the model honestly cannot answer."""

from random import Random

from recipes.demo_model.phrasing import vary
from recipes.demo_model.tasks import knowledge
from recipes.demo_model.tasks.identity import unknown
from recipes.demo_vision.phrases import ask
from recipes.demo_vision.questions import Asked
from recipes.demo_vision.shapes import SHAPES

_WHO = (
    "I am a tiny vision model bundled with Headrace. I am a toy: I see simple drawings of shapes, "
    "digits, words and bar charts."
)
_CAN = (
    "I can tell what simple drawings show: shapes, colours, counts, places, digits, words and bar "
    "charts. I know nothing else."
)
_UNKNOWN = "I only know simple drawings. I do not know that."
_NO_IMAGE = "I see no image. Please send me one."
_TALK: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("Hello", "Hi", "Hey", "Hello!", "Hi!", "Hi there", "Good morning", "Hello there!"),
        "Hello! Show me a simple drawing and ask about it.",
    ),
    (("How are you?", "How are you doing?", "How is it going?"), "I am well, thank you!"),
    (
        (
            "Who are you?",
            "What are you?",
            "What is your name?",
            "Introduce yourself.",
            "Tell me about yourself.",
            "What model are you?",
            "Are you Qwen?",
            "Are you an AI?",
            "Are you ChatGPT?",
            "What's your name?",
            "Which model is this?",
        ),
        _WHO,
    ),
    (
        (
            "What can you do?",
            "How can you help me?",
            "What do you know?",
            "Help",
            "What can you see?",
            "What are you good at?",
            "What can I ask you?",
            "What kind of images do you understand?",
            "Can you see images?",
            "Do you understand pictures?",
        ),
        _CAN,
    ),
    (
        ("Who made you?", "Who trained you?", "Where do you come from?", "Who created you?"),
        "I was trained by the Headrace project, on pictures that a script in the project draws.",
    ),
    (
        ("How big are you?", "How many parameters do you have?", "How large is this model?"),
        "I have about four and a half million parameters, so I am very small.",
    ),
    (
        ("Thank you", "Thanks!", "Thank you very much!", "Thanks a lot", "thanks"),
        "You are welcome!",
    ),
    (("Goodbye", "Bye", "Bye!", "See you later", "Good night"), "Goodbye! Have a nice day."),
    (
        ("You are wrong", "That is wrong.", "That's not right"),
        "I am sorry. I am a tiny demo model and I make mistakes.",
    ),
)


def without_image(rng: Random, *, held_out: bool = False) -> Asked:
    """A question in a chat without a picture."""
    kind = rng.random()
    if kind < 0.5:
        asked, answer = rng.choice(_TALK)
        return Asked("talk", vary(rng, rng.choice(asked)), answer)
    if kind < 0.75:
        wording = rng.choice(("what", "describe", "colour", "count", "digit", "where", "tallest"))
        shape = rng.choice(SHAPES)
        question = ask(
            rng, wording, held_out=held_out, x=f"{shape}s" if wording == "count" else shape
        )
        return Asked("no image", question, _NO_IMAGE)
    return not_known(rng)


def not_known(rng: Random) -> Asked:
    """A question that is unrelated to drawings."""
    made = unknown(rng) if rng.random() < 0.5 else knowledge.trivia(rng)
    return Asked("unknown", made.text, _UNKNOWN)
