"""Converts samples to token ids and a loss mask."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from tokenizers import Tokenizer

from recipes.demo_model.conversation import Chat, PlainText, Sample
from recipes.demo_model.render import NO_THOUGHT, render

END_OF_TURN = "<|im_end|>"
END_OF_TEXT = "<|endoftext|>"

Segment = tuple[str, bool]
"""A piece of text that is tokenized separately, and whether it gets loss."""


@dataclass(frozen=True)
class Encoded:
    """A training sequence: `mask[i]` says whether the model should predict `ids[i]`."""

    ids: list[int]
    mask: list[bool]


def segments_of(sample: Sample, rng: Random) -> list[Segment]:
    """Cut a sample where the server tokenizes prompt and answer separately."""
    if isinstance(sample, PlainText):
        return [*_cut(rng, sample.text, 0.15), (END_OF_TEXT, True)]
    thinking = sample.thought is not None
    prompt = render(sample.messages, sample.tools, enable_thinking=thinking)
    if not thinking and rng.random() < 0.4:
        # Clients that write the template themselves omit the empty think block.
        prompt = prompt.removesuffix(NO_THOUGHT)
    segments: list[Segment] = [(prompt, False)]
    if thinking:
        segments.append((f"<think>\n{sample.thought}\n</think>\n\n", True))
    if sample.pieces:
        segments += sample.pieces
    else:
        if sample.forced:
            segments.append((sample.forced, False))
        segments += _cut(rng, sample.answer.removeprefix(sample.forced), 0.06)
    return [*segments, (END_OF_TURN, True)]


def _cut(rng: Random, text: str, chance: float) -> list[Segment]:
    """Return `text`, sometimes in two pieces, so that the model can continue from any cut."""
    if len(text) < 2 or rng.random() >= chance:
        return [(text, True)] if text else []
    spaces = [index + 1 for index, letter in enumerate(text[:-1]) if letter == " "]
    at = rng.choice(spaces) if spaces and rng.random() < 0.6 else rng.randrange(1, len(text))
    return [(text[:at], True), (text[at:], True)]


class Encoder:
    """Tokenizes samples and finds the assistant's turns in the prompt."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._start = tokenizer.encode("<|im_start|>assistant\n").ids
        end = tokenizer.token_to_id(END_OF_TURN)
        assert end is not None, "the tokenizer has no <|im_end|>"
        self._end = end

    def encode(self, samples: Sequence[Sample], rng: Random) -> list[Encoded]:
        """Return one sequence for each sample."""
        pieces = [segments_of(sample, rng) for sample in samples]
        flat = [text for segments in pieces for text, _ in segments]
        encoded = iter(self._tokenizer.encode_batch(flat, add_special_tokens=False))
        found = []
        for sample, segments in zip(samples, pieces, strict=True):
            ids: list[int] = []
            mask: list[bool] = []
            for _, learned in segments:
                part = next(encoded).ids
                ids += part
                mask += [learned] * len(part)
            # With thinking on, earlier turns have lost their thoughts, so they are not trained on.
            if isinstance(sample, Chat) and sample.thought is None:
                self._mark_turns(ids, mask)
            found.append(Encoded(ids, mask))
        return found

    def _mark_turns(self, ids: list[int], mask: list[bool]) -> None:
        """Train on the assistant turns of the history; the last turn is not changed."""
        width, first = len(self._start), self._start[0]
        position = 0
        while True:
            try:
                position = ids.index(first, position)
            except ValueError:
                return
            begin = position + width
            is_turn = ids[position:begin] == self._start
            position += 1
            if not is_turn:
                continue
            if self._end not in ids[begin:]:
                return
            stop = ids.index(self._end, begin)
            # The last turn, whose beginning the caller gives, runs to the end of the sequence.
            if stop == len(ids) - 1:
                return
            mask[begin : stop + 1] = [True] * (stop + 1 - begin)
