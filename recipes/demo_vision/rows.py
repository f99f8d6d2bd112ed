"""Turns pictures and questions into rows of fixed size, which batches stack.

A row holds the beginning of one prompt with its pictures, followed by several questions. Each
question attends only to the beginning and to itself, at the positions that it would have alone. So
the answers equal those of separate prompts, while the pictures are read once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from recipes.demo_vision.draw import CELL, PATCH, Pixels, patches
from recipes.demo_vision.questions import Asked
from recipes.demo_vision.shape import END_OF_TURN, token_id

PATCH_BYTES = PATCH * PATCH * 3
SYSTEM = "You are a helpful assistant."
PADDING = 255
"""The segment of the positions beyond the end of a row."""


@dataclass(frozen=True)
class Layout:
    """Sizes of a row: merged patches, tokens, and learned targets."""

    cells: int
    length: int
    targets: int

    def fields(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype of each array of a row."""
        count = 4 * self.cells
        return {
            "pixels": ((count, PATCH_BYTES), "uint8"),
            "window": ((count,), "uint8"),  # of a picture's part; 255: no patch
            "picture": ((count,), "uint8"),
            "place": ((count, 2), "uint8"),  # row and column of a patch in its picture
            "slot": ((self.cells,), "int16"),  # position of a merged patch in the row; -1: none
            "ids": ((self.length,), "int16"),
            "segment": ((self.length,), "uint8"),
            "position": ((3, self.length), "int16"),
            "at": ((self.targets,), "int16"),  # positions whose next token is learned; -1: none
            "target": ((self.targets,), "int16"),
            "question": (
                (self.targets,),
                "uint8",
            ),  # the question of the row to which a target belongs
        }


ONE = Layout(cells=64, length=256, targets=112)
TWO = Layout(cells=128, length=320, targets=128)
Row = dict[str, NDArray[np.generic]]


class RowWriter:
    """Writes rows of one layout."""

    def __init__(self, tokenizer: Tokenizer, layout: Layout, window: int) -> None:
        """Prepare the fixed ids; `window` is the side of the tower's windows in pixels."""
        self.layout = layout
        self._tokenizer = tokenizer
        self._cache: dict[str, list[int]] = {}
        self._image = token_id(tokenizer, "<|image_pad|>")
        self._window = window // CELL
        self._grids: dict[tuple[int, int], tuple[NDArray[np.uint8], NDArray[np.uint8]]] = {}
        self._end = token_id(tokenizer, END_OF_TURN)

    def encode(self, text: str) -> list[int]:
        """The ids of a piece of text that begins and ends at special tokens."""
        found = self._cache.get(text)
        if found is None:
            if len(self._cache) > 50_000:
                self._cache.clear()
            found = self._cache[text] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return found

    def empty(self) -> Row:
        """An empty row."""
        row: Row = {
            name: np.zeros(shape, dtype) for name, (shape, dtype) in self.layout.fields().items()
        }
        self.clear(row)
        return row

    def clear(self, row: Row) -> None:
        """Make a row empty."""
        for name in ("window", "picture", "segment"):
            row[name][...] = PADDING
        for name in ("slot", "at", "target"):
            row[name][...] = -1
        for name in ("ids", "position", "place", "question"):
            row[name][...] = 0

    def _grid(self, high: int, wide: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Place and window of each patch of a picture of `high` by `wide` cells."""
        found = self._grids.get((high, wide))
        if found is None:
            y, x = np.mgrid[0 : 2 * high, 0 : 2 * wide]
            by_cell = (high, 2, wide, 2)
            y, x = (v.reshape(by_cell).transpose(0, 2, 1, 3).reshape(-1) for v in (y, x))
            side = 2 * self._window
            windows = (y // side) * 16 + x // side
            found = np.stack([y, x], -1).astype(np.uint8), windows.astype(np.uint8)
            self._grids[high, wide] = found
        return found

    def write(
        self,
        row: Row,
        pictures: Sequence[Pixels],
        questions: Sequence[Asked],
        *,
        system: str | None = SYSTEM,
        image_last: bool = False,
        chained: bool = False,
        prompt_only: bool = False,
    ) -> int:
        """Fill a row; returns how many questions fit.

        Args:
            row: arrays to write into.
            pictures: pictures at the beginning of the prompt.
            questions: as many as fit are used, at least one.
            system: the system prompt; None omits it.
            image_last: whether the question comes before the pictures; then only one question.
            chained: whether the questions are turns of one conversation instead of alternatives.
            prompt_only: whether to stop before the first answer, which is then to be generated.
        """
        self.clear(row)
        head = "" if system is None else f"<|im_start|>system\n{system}<|im_end|>\n"
        ids: list[int] = []
        self._spot = 0
        self._position: list[list[int]] = [[], [], []]
        self._text(ids, self.encode(head + "<|im_start|>user\n"))
        if image_last:
            self._text(ids, self.encode(questions[0].question))
        cell = 0
        for number, picture in enumerate(pictures):
            cell = self._picture(row, ids, picture, number, cell)
        begin, spot = len(ids), self._spot
        segments = [0] * begin
        target = taken = 0
        opened = "<|im_start|>user\n"
        for number, asked in enumerate(questions):
            if chained and number:
                start = self.encode("\n" + opened)
            else:
                self._spot = spot
                start = []
            asked_ids = [] if image_last else self.encode(asked.question)
            prompt = [*start, *asked_ids, *self.encode("<|im_end|>\n<|im_start|>assistant\n")]
            answer = [] if prompt_only else [*self.encode(asked.answer), self._end]
            size = len(prompt) + len(answer)
            full = len(ids) + size > self.layout.length or (
                target + len(answer) > self.layout.targets
            )
            if full:
                assert taken, "a row must hold a question"
                break
            first = len(ids) + len(prompt) - 1
            count = slice(target, target + len(answer))
            row["at"][count] = np.arange(first, first + len(answer))
            row["target"][count] = answer
            row["question"][count] = number
            target += len(answer)
            self._text(ids, [*prompt, *answer])
            segments += [1 if chained else number + 1] * size
            taken += 1
            if image_last or prompt_only:
                break
        row["ids"][: len(ids)] = ids
        row["segment"][: len(ids)] = segments
        row["position"][:, : len(ids)] = self._position
        return taken

    def _text(self, ids: list[int], more: list[int]) -> None:
        ids += more
        for axis in self._position:
            axis.extend(range(self._spot, self._spot + len(more)))
        self._spot += len(more)

    def _picture(self, row: Row, ids: list[int], picture: Pixels, number: int, cell: int) -> int:
        high, wide = picture.shape[0] // CELL, picture.shape[1] // CELL
        self._text(ids, self.encode("<|vision_start|>"))
        count = high * wide
        here = slice(4 * cell, 4 * (cell + count))
        row["pixels"][here] = patches(picture)
        row["place"][here], row["window"][here] = self._grid(high, wide)
        row["picture"][here] = number
        row["slot"][cell : cell + count] = np.arange(len(ids), len(ids) + count)
        ids += [self._image] * count
        spot = self._spot
        self._position[0] += [spot] * count
        self._position[1] += [spot + index // wide for index in range(count)]
        self._position[2] += [spot + index % wide for index in range(count)]
        self._spot = spot + max(high, wide)
        self._text(ids, self.encode("<|vision_end|>"))
        return cell + count
