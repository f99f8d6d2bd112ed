"""Builds prompts for `suffix` of a completion: the model writes the text before the suffix.

Models trained to fill in the middle have special tokens that separate the parts. The tokenizer's
added tokens show which form a model uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from runtime.client.admission import EngineLimits
from runtime.errors import InvalidRequest
from runtime.requests.sampling_params import SamplingParams
from runtime.text.encoding import encode_prompts
from runtime.text.tokenizer import Tokenizer

# This character, put before a text, keeps tokenizers from adding a space there. No tokenizer merges
# it with the text.
_GUARD = "☺"
# A full-width vertical bar, which looks like the ASCII one.
_BAR = "\uff5c"


@dataclass(frozen=True)
class InfillForm:
    """The infill prompt of a family of models: three tokens, each of which precedes its part.

    Attributes:
        prefix, suffix, middle: texts of the tokens; the model writes the middle.
        ends: tokens that end the middle, besides the model's end of text; the tokenizer may lack
            some.
        joins_suffix: the suffix is encoded without the space that the tokenizer adds before text.
    """

    prefix: str
    suffix: str
    middle: str
    ends: tuple[str, ...] = ("<|endoftext|>",)
    joins_suffix: bool = False


FORMS = {
    "Qwen2.5-Coder, CodeGemma": InfillForm(
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
        ("<|endoftext|>", "<|fim_pad|>", "<|file_sep|>", "<|file_separator|>", "<|repo_name|>"),
    ),
    "StarCoder": InfillForm(
        "<fim_prefix>", "<fim_suffix>", "<fim_middle>", ("<|endoftext|>", "<file_sep>")
    ),
    "SantaCoder": InfillForm("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    "CodeLlama": InfillForm("▁<PRE>", "▁<SUF>", "▁<MID>", ("▁<EOT>",), joins_suffix=True),
    "DeepSeek-Coder": InfillForm(
        f"<{_BAR}fim▁begin{_BAR}>",
        f"<{_BAR}fim▁hole{_BAR}>",
        f"<{_BAR}fim▁end{_BAR}>",
        (f"<{_BAR}end▁of▁sentence{_BAR}>",),
    ),
}


@dataclass(frozen=True)
class Infill:
    """A form as token ids of a tokenizer.

    Attributes:
        begin: ids that the tokenizer puts before every prompt.
        stop_ids: tokens that end the middle.
    """

    tokenizer: Tokenizer
    form: InfillForm
    begin: list[int]
    prefix_id: int
    suffix_id: int
    middle_id: int
    stop_ids: list[int]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Infill | None:
        """Find the first form whose tokens the tokenizer has; None if there is none."""
        if tokenizer.is_missing:
            return None
        ids = {
            token.content: i for i, token in tokenizer.backend.get_added_tokens_decoder().items()
        }
        for form in FORMS.values():
            marks = [ids.get(mark) for mark in (form.prefix, form.suffix, form.middle)]
            prefix_id, suffix_id, middle_id = marks
            if prefix_id is None or suffix_id is None or middle_id is None:
                continue
            begin, end = tokenizer.encode(""), tokenizer.eos_token_id
            if begin and begin[-1] == end:
                begin.pop()
            stop_ids = [ids[text] for text in form.ends if text in ids]
            return cls(tokenizer, form, begin, prefix_id, suffix_id, middle_id, stop_ids)
        return None

    async def encode(
        self, prompts: Sequence[str | list[int]], suffix: str, limits: EngineLimits
    ) -> list[list[int]]:
        """Encode prompts that request the text between each prompt and `suffix`.

        Raises:
            InvalidRequest: the texts together are too long, or one has half a surrogate pair.
            TooLong: a prompt is longer than the context or the KV pool.
            Overloaded: too many requests wait for the tokenizer.
        """
        guard = _GUARD if self.form.joins_suffix else ""
        texts = [*prompts, guard + suffix]
        *parts, after = await encode_prompts(
            self.tokenizer, texts, limits, add_special_tokens=False
        )
        if guard:
            after = after[len(self.tokenizer.encode(guard, add_special_tokens=False)) :]
        end = [self.suffix_id, *after, self.middle_id]
        return [[*self.begin, self.prefix_id, *part, *end] for part in parts]

    def ending(self, sampling: SamplingParams) -> SamplingParams:
        """Add the tokens that end the middle to the stop tokens of `sampling`."""
        stops = sorted({*sampling.stop_token_ids, *self.stop_ids})
        return msgspec.structs.replace(sampling, stop_token_ids=stops)


def required_infill(infill: Infill | None) -> Infill:
    """The model's form.

    Raises:
        InvalidRequest: the model has no infill form.
    """
    if infill is None:
        raise InvalidRequest(
            "suffix needs a model that was trained to fill in the middle: this tokenizer does not "
            f"have the tokens of any known form ({', '.join(FORMS)}).",
            param="suffix",
        )
    return infill
