"""Texts that are drawn at random for a reader."""

from pathlib import Path

from tools.draw_texts import docstrings, paragraphs


def test_each_docstring_has_what_stands_above_it(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        '"""Of the file."""\n\n\nclass A:\n    """Of the class."""\n\n'
        "    def of(\n        self, x: int\n    ) -> int:\n"
        '        """Return x."""\n        return x\n'
        "\n    def silent(self) -> None: ...\n"
    )
    of_class, of_method = docstrings([tmp_path])
    assert of_class == 'FILE a.py\n    Of the file.\nITEM:\nclass A:\n    """Of the class."""'
    assert of_method == (
        "FILE a.py\n    Of the file.\nCLASS A\n    Of the class.\nITEM:\n"
        '    def of(\n        self, x: int\n    ) -> int:\n    """Return x."""'
    )


def test_a_paragraph_has_its_title_and_section(tmp_path: Path) -> None:
    words = "word " * 15
    (tmp_path / "a.md").write_text(
        f"# Page\n\nToo short.\n\n```\n{words}\n\n{words}\n```\n\n"
        f"## Section\n\n{words}\n\n| {words}|\n"
    )
    (found,) = paragraphs(tmp_path)
    assert found == f"PAGE a.md # Page ## Section\nITEM:\n{words.strip()}"
