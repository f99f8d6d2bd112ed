"""Makes prompts for a completion's `suffix`: the model writes the text between prompt and suffix.

Models that were trained to fill in the middle have special tokens that separate the parts. Which
format a model uses is seen from the added tokens of its tokenizer.
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

# A character that is put before the suffix, so that the tokenizer does not add a space there. No
# tokenizer merges it with the text. Its tokens are removed afterwards.
_GUARD = "☺"
# A full-width vertical bar, which looks like the ASCII one.
_BAR = "\uff5c"


@dataclass(frozen=True)
class InfillForm:
    """The infill prompt of a family of models: three special tokens, each before its part.

    Attributes:
        prefix, suffix, middle: texts of the special tokens; the model writes the middle.
        ends: texts of tokens that end the middle, besides the model's end of text. The tokenizer
            may lack some of them.
        joins_suffix: whether the suffix is encoded without the space that the tokenizer adds before
            a text.
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
    """An infill format with the token ids of one tokenizer.

    Attributes:
        begin: ids that the tokenizer puts before every prompt.
        prefix_id, suffix_id, middle_id: ids of the three special tokens.
        stop_ids: ids of the tokens that end the middle.
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
        """Return the first infill format whose tokens the tokenizer has; None if there is none."""
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
        """Return a prompt, as token ids, for the text between each of `prompts` and `suffix`.

        Raises:
            InvalidRequest: the texts together are too long, or one has a lone surrogate.
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
        """Return `sampling` with the tokens that end the middle added to its stop tokens."""
        stops = sorted({*sampling.stop_token_ids, *self.stop_ids})
        return msgspec.structs.replace(sampling, stop_token_ids=stops)


def required_infill(infill: Infill | None) -> Infill:
    """Return `infill` if the model has an infill format.

    Raises:
        InvalidRequest: the model has none.
    """
    if infill is None:
        raise InvalidRequest(
            "suffix needs a model that was trained to fill in the middle: this tokenizer does not "
            f"have the tokens of any known form ({', '.join(FORMS)}).",
            param="suffix",
        )
    return infill
