"""Word lists written as text, because hundreds of quoted words are hard to read."""


def listed(text: str, separator: str = " ") -> list[str]:
    """The words of `text`."""
    return text.split(separator)
