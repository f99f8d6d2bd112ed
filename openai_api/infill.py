"""`suffix` of a completion: prompts that ask for what stands between two texts.

Models trained for it know tokens that set the texts apart: the tokenizer's tell the form.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from runtime.client.admission import EngineLimits
from runtime.client.tokenization import encode_prompts
from runtime.errors import InvalidRequest
from runtime.requests.sampling_params import SamplingParams
from runtime.text.tokenizer import Tokenizer

# In front of a text, it keeps tokenizers from writing a space there; none makes one token of both.
_GUARD = "☺"
# A vertical line of full width, which is easily taken for another.
_BAR = "\uff5c"


@dataclass(frozen=True)
class InfillForm:
    """How a family of models is asked: the three tokens, each ahead of its part.

    Attributes:
        prefix, suffix, middle: texts of the tokens; the middle is what the model writes.
        ends: tokens that end it as the model's own end of text does, where the tokenizer has them.
        joins_suffix: the suffix gets no space in front where the tokenizer writes one.
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
    """A form in the ids of a tokenizer.

    Attributes:
        begin: what the tokenizer puts ahead of every prompt.
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
        """The form that the tokenizer has the tokens of; None where it has none."""
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
        """Token ids that ask for what stands between each prompt and `suffix`.

        Raises:
            InvalidRequest: the texts are too long together, or one holds half a surrogate pair.
            TooLong: a prompt is longer than the context or the KV pool.
            Overloaded: too many other requests wait for the same.
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
        """`sampling` that also ends where the middle does."""
        stops = sorted({*sampling.stop_token_ids, *self.stop_ids})
        return msgspec.structs.replace(sampling, stop_token_ids=stops)


def required_infill(infill: Infill | None) -> Infill:
    """The model's form.

    Raises:
        InvalidRequest: it has none.
    """
    if infill is None:
        raise InvalidRequest(
            "suffix needs a model that was trained to fill in: this tokenizer has not the tokens "
            f"for it ({', '.join(FORMS)}).",
            param="suffix",
        )
    return infill
