"""The forms in which weights are stored, under the names of GGUF's types, and their block sizes."""

from dataclasses import dataclass

__all__ = ["FORMS", "StoredForm", "find_form"]


@dataclass(frozen=True)
class StoredForm:
    """The layout of a matrix's row in memory: consecutive blocks.

    Attributes:
        name: GGUF's name of the type, in lower case.
        block_values: numbers of a block; a row holds whole blocks.
        block_bytes: bytes of a block.
    """

    name: str
    block_values: int
    block_bytes: int

    def row_bytes(self, in_features: int) -> int:
        """Return the bytes of a row with `in_features` numbers.

        Raises:
            ValueError: `in_features` is not a whole number of blocks.
        """
        blocks, left = divmod(in_features, self.block_values)
        if left:
            raise ValueError(
                f"{self.name} has blocks of {self.block_values} values: "
                f"a row of {in_features} does not fit"
            )
        return blocks * self.block_bytes


FORMS: dict[str, StoredForm] = {
    form.name: form
    for form in (
        StoredForm("f32", 1, 4),
        StoredForm("f16", 1, 2),
        StoredForm("bf16", 1, 2),
        StoredForm("q4_0", 32, 18),
        StoredForm("q4_1", 32, 20),
        StoredForm("q5_0", 32, 22),
        StoredForm("q5_1", 32, 24),
        StoredForm("q8_0", 32, 34),
        StoredForm("q2_k", 256, 84),
        StoredForm("q3_k", 256, 110),
        StoredForm("q4_k", 256, 144),
        StoredForm("q5_k", 256, 176),
        StoredForm("q6_k", 256, 210),
        StoredForm("iq4_nl", 32, 18),
        StoredForm("iq4_xs", 256, 136),
        StoredForm("mxfp4", 32, 17),
    )
}


def find_form(name: str) -> StoredForm:
    """Return the form called `name`.

    Raises:
        ValueError: the form is unknown; the message lists the names.
    """
    try:
        return FORMS[name]
    except KeyError:
        raise ValueError(f"no stored form {name!r}; there are {', '.join(FORMS)}") from None
