"""How people vary a request: politeness, case, missing punctuation, system prompts."""

from random import Random

from recipes.demo_model.conversation import Question
from recipes.demo_model.lexicon import any_word, blend
from recipes.demo_model.words import NAMES, PLACES

SYSTEM_PROMPTS = [
    "You are a helpful assistant.",
    "You are a helpful assistant than can answer questions.",
    "You are a helpful assistant that can answer questions.",
    "You are a helpful AI assistant.",
    "You are a friendly assistant.",
    "You are an assistant.",
    "You are a concise assistant.",
    "Answer the question.",
    "You are an expert in geography.",
    "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.",
    "You are a helpful assistant. Be polite.",
    "You are a knowledgeable assistant who helps users with their questions.",
    "You are a chat bot.",
    "Please answer the user's questions.",
    "You help people.",
    "Be helpful and honest.",
    "A chat between a curious user and an assistant.",
    "You are a teacher who explains things simply.",
]

_BEFORE = ["Please tell me: ", "Quick question: ", "Hey, ", "Hi! ", "Hello. ", "Question: ",
           "Tell me, ", "Can you help me? ", "I have a question. ", "Ok, ", "Hello, ",
           "Answer this: ", "Answer the question: "]  # fmt: skip
_AFTER = [" Please.", " Thanks!", " Thank you.", " Please answer.", " Tell me.", " I am curious."]


def vary(rng: Random, text: str) -> str:
    """`text` as another person might type it; the meaning, names and numbers are kept."""
    if rng.random() < 0.5:
        return text
    if rng.random() < 0.25:
        before = rng.choice(_BEFORE)
        keep = before[-2] in ".!?:" or text[:1].isdigit() or text[:2] == "I "
        text = before + (text if keep else text[0].lower() + text[1:])
    if rng.random() < 0.15:
        text += rng.choice(_AFTER)
    if rng.random() < 0.2:
        text = text.rstrip("?.")
    if rng.random() < 0.15:
        text = text.lower()
    elif rng.random() < 0.03:
        text = text.upper()
    if rng.random() < 0.05:
        text = rng.choice([" " + text, text + " ", text + "\n", text.replace("?", " ?")])
    return text


def system_prompt(rng: Random) -> str:
    """A system prompt that does not change the answer."""
    return rng.choice(SYSTEM_PROMPTS)


def spoken(rng: Random, question: Question) -> str:
    """The question's text, varied if that is allowed."""
    return question.text if question.exact else vary(rng, question.text)


def made_up_word(rng: Random) -> str:
    """A pronounceable word without meaning."""
    return blend(rng)


_UNICODE = (
    "你好世界中文测试日本語東京こんにちは한국어안녕приветмирελληνικά 🎉😀🚀🌍👍🏽👩‍💻❤️✨ "
    "çñüßøåéèêàâîôûäöżłęąšžýőű"
)


def unicode_text(rng: Random) -> str:
    """A few characters outside ASCII, some of them of several bytes and code points."""
    if rng.random() < 0.4:
        return rng.choice(
            ["你好，世界", "こんにちは", "안녕하세요", "Привет, мир", "🎉🚀", "👩‍💻", "❤️ ✨",
             "naïve café", "Zürich", "São Paulo", "Ελλάδα", "👍🏽", "日本語", "𝄞 music", "żółw"]
        )  # fmt: skip
    kind = rng.random()
    if kind < 0.5:
        return "".join(chr(rng.randint(0x4E00, 0x9FA5)) for _ in range(rng.randint(1, 6)))
    if kind < 0.7:
        return "".join(chr(rng.randint(0x1F300, 0x1F64F)) for _ in range(rng.randint(1, 3)))
    start = rng.randrange(len(_UNICODE) - 8)
    return _UNICODE[start : start + rng.randint(2, 8)].strip()


def literal(rng: Random) -> str:
    """A string to copy: words, names, blends, numbers, codes, Unicode."""
    kind = rng.randrange(12)
    if kind == 0:
        return rng.choice(NAMES)
    if kind == 1:
        return rng.choice(PLACES)
    if kind <= 4:
        return any_word(rng)
    if kind <= 6:
        return " ".join(any_word(rng) for _ in range(rng.randint(2, 5)))
    if kind == 7:
        return any_word(rng).capitalize()
    if kind == 8:
        return str(rng.randint(0, 10 ** rng.randint(1, 6)))
    if kind == 9:
        letters = "ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnpqrstuvwxyz0123456789"
        return "".join(rng.choice(letters) for _ in range(rng.randint(3, 8)))
    if kind == 10:
        return unicode_text(rng)
    return any_word(rng).capitalize() + " " + any_word(rng).capitalize()
