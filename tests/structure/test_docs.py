"""Links lead somewhere, and the README promises only commands that exist."""

import re
from pathlib import Path

import pytest

from runtime.client import answer_size
from runtime.eventloop import large_body
from runtime.requests.sampling_params import SamplingFields
from runtime.service import choices, prefills
from runtime.text import encoding
from server.native import tokenize

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").rglob("*.md")]
LINK = re.compile(r"\]\(([^)#\s]+)(#[^)]*)?\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    for target, _ in LINK.findall(page.read_text()):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", [*(ROOT / "docs").rglob("*.md")], ids=lambda p: p.name)
def test_a_page_fits_in_one_sitting(page: Path) -> None:
    # Two are looked up, not read.
    if page.name not in ("options.md", "lang_reference.md"):
        assert len(page.read_text().splitlines()) < 200


def test_make_targets_of_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for text in ("README.md", "CONTRIBUTING.md"):
        for target in re.findall(r"^make ([a-z-]+)", (ROOT / text).read_text(), re.MULTILINE):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_the_page_of_limits_tells_the_bounds() -> None:
    bounds = {
        large_body.MAX_NUMBERS,
        large_body.MAX_PARTS,
        large_body.MAX_ITEMS,
        large_body.MAX_NESTED_ITEMS,
        large_body.MAX_TEXT_BYTES,
        large_body.MAX_MEMBERS,
        large_body.PIECE_BYTES // 1024,
        answer_size.MAX_NUMBERS,
        answer_size.MAX_PROMPT_TOKENS,
        prefills.MAX_TOKENS_TOGETHER,
        choices.MAX_CHOICE_TOKENS,
        encoding.MAX_TEXT_CHARS,
        tokenize.MAX_TOKENIZE_CHARS,
        tokenize.MAX_DETOKENIZE_IDS,
    }
    page = (ROOT / "docs" / "limits.md").read_text()
    assert {bound for bound in bounds if f"{bound:,}" not in page} == set()


def test_the_page_of_sampling_parameters_has_every_key() -> None:
    page = (ROOT / "docs" / "sampling_params.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    told = {key for line in rows for key in re.findall(r"`(\w+)`", line.split("|")[1])}
    assert told == set(SamplingFields.__struct_fields__)


def test_decision_records_are_short() -> None:
    for path in (ROOT / "docs" / "decisions").glob("*.md"):
        assert len(path.read_text().splitlines()) < 40, path.name


def test_the_list_of_pages_has_every_page() -> None:
    listed = {target for target, _ in LINK.findall((ROOT / "docs" / "README.md").read_text())}
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert pages <= listed
