"""Which prompt stands ahead of a request's texts, and how many tokens it takes."""

from __future__ import annotations

from runtime.checkpoint.model_spec import ModelSpec
from runtime.checkpoint.text_prompts import FILE
from runtime.client.tokenization import encode_texts
from runtime.errors import InvalidRequest
from runtime.text.tokenizer import Tokenizer

# Names that a refusal lists.
_MAX_LISTED = 32


def choose_prompt(model: ModelSpec, prompt: str | None, name: str | None) -> str:
    """The prompt of a request, empty for none.

    Args:
        model: whose own prompts may be named.
        prompt: the text itself; an empty one turns the model's default off.
        name: of one of the model's own.

    Raises:
        InvalidRequest: both are given, no such prompt, or the model gives no vectors.
    """
    given = "prompt_name" if name is not None else "prompt"
    if prompt is not None and name is not None:
        raise InvalidRequest("Give prompt or prompt_name, not both.", param=given)
    if prompt is None and name is None:
        return model.prompts.by_name.get(model.prompts.default, "")
    if model.gives != "vectors":
        raise InvalidRequest(f"{given} is for models that give vectors.", param=given)
    if name is None:
        return prompt or ""
    prompts = model.prompts.by_name
    if name in prompts:
        return prompts[name]
    if not prompts:
        raise InvalidRequest(
            f"prompt_name must be absent: the model's folder names no prompts ({FILE}).",
            param=given,
        )
    names = ", ".join(list(prompts)[:_MAX_LISTED])
    raise InvalidRequest(f"prompt_name must be one of {names}; got {name[:64]!r}.", param=given)


async def count_prompt_tokens(tokenizer: Tokenizer, prompt: str) -> int:
    """Tokens that `prompt` takes ahead of a text, with those that begin every text.

    As sentence-transformers counts them: of the prompt alone, without the token that ends a text.
    """
    (ids,) = await encode_texts(tokenizer, [prompt])
    ends = bool(ids) and ids[-1] in tokenizer.special_ids
    return len(ids) - int(ends)
