"""Word lists written as text: hundreds of quoted words would bury the data under marks."""


def listed(text: str, separator: str = " ") -> list[str]:
    """The words of `text`."""
    return text.split(separator)
