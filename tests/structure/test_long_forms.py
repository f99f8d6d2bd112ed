"""What `make test` omits, which is what `tests.support.long_forms` finds shown by other tests."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.support.long_forms import with_all_pairs


@pytest.mark.parametrize("sizes", [(7, 3, 2), (2, 2, 2, 2, 2), (6, 3), (5,)], ids=str)
def test_few_rows_have_all_pairs(sizes: tuple[int, ...]) -> None:
    axes = zip("abcde", sizes, strict=False)
    rows = {row: row for row in product(*([(name, at) for at in range(n)] for name, n in axes))}
    kept = with_all_pairs(rows)
    if len(sizes) < 3:
        assert kept == set(rows)
        return
    assert {pair for row in kept for pair in combinations(row, 2)} == {
        pair for row in rows for pair in combinations(row, 2)
    }
    assert len(kept) <= len(rows) / 2


def runs_all(request: pytest.FixtureRequest) -> bool:
    config = request.config
    return config.getoption("long") or any("::" in argument for argument in config.args)


@pytest.mark.long
def test_a_long_form_runs_on_request_only(request: pytest.FixtureRequest) -> None:
    assert runs_all(request)


@pytest.mark.pairs(each=("each",))
@pytest.mark.parametrize("each", [1, 2])
@pytest.mark.parametrize("one", ["a", "b", "c"])
@pytest.mark.parametrize(("two", "three"), [(0, 0), (0, 1)])
@pytest.mark.parametrize("four", [None, 1])
def test_a_table_is_cut(
    request: pytest.FixtureRequest, each: int, one: str, two: int, three: int, four: int | None
) -> None:
    assert isinstance(request.node, pytest.Function)
    name = request.node.originalname
    rows = [item for item in request.session.items if item.name.startswith(f"{name}[")]
    assert len(rows) == (24 if runs_all(request) else 12)
