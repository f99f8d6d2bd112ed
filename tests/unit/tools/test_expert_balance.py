"""`headrace experts`: figures of a file, its picture, and files that are something else."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import pytest

from headrace import cli
from headrace.experts.balance import balance_of, read_counts
from headrace.experts.heat_map import heat_map

HEADER = "layer_id,expert_id,count\n"


def write(path: Path, *rows: list[int]) -> Path:
    lines = [f"{i},{j},{count}\n" for i, row in enumerate(rows) for j, count in enumerate(row)]
    path.write_text(HEADER + "".join(lines))
    return path


def run(*arguments: str | Path) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(["experts", *map(str, arguments)])
    status: int = ended.value.code  # type: ignore[assignment]
    return status


def pixels(png: bytes) -> list[list[tuple[int, int, int]]]:
    """Rows of a picture whose lines have no filter; checks every chunk's sum."""
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    chunks, place = {}, 8
    while place < len(png):
        (length,) = struct.unpack_from(">I", png, place)
        kind, data = png[place + 4 : place + 8], png[place + 8 : place + 8 + length]
        (crc,) = struct.unpack_from(">I", png, place + 8 + length)
        assert crc == zlib.crc32(kind + data)
        chunks[kind] = data
        place += 12 + length
    assert list(chunks) == [b"IHDR", b"IDAT", b"IEND"]
    width, height = struct.unpack_from(">II", chunks[b"IHDR"])
    raw, size = zlib.decompress(chunks[b"IDAT"]), 1 + 3 * width
    assert len(raw) == height * size
    lines = [raw[i * size : (i + 1) * size] for i in range(height)]
    assert all(line[0] == 0 for line in lines)
    return [[tuple(line[1 + 3 * x : 4 + 3 * x]) for x in range(width)] for line in lines]  # type: ignore[misc]


def test_figures_of_a_layer() -> None:
    even = balance_of(0, [5, 5, 5, 5])
    assert (even.max_to_mean, even.entropy, even.unused) == (1.0, pytest.approx(1.0), 0.0)
    one = balance_of(3, [0, 0, 12, 0])
    assert (one.layer, one.num_choices, one.max_to_mean, one.unused) == (3, 12, 4.0, 0.75)
    assert one.entropy == 0
    assert one.top == [(2, 1.0)]
    half = balance_of(0, [1, 1, 0, 0])
    assert half.entropy == pytest.approx(0.5)
    assert half.top == [(0, 0.5), (1, 0.5)]
    assert balance_of(0, [7]).entropy == 1.0


def test_the_table_and_the_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "record.csv", [0, 0, 0, 0], [30, 10, 0, 0], [5, 5, 5, 5])
    png = tmp_path / "map.png"
    assert run(path, "--png", png) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].split() == ["layer", "tokens", "max/mean", "entropy", "unused", "top"]
    # The first layer is dense.
    assert printed[1].split() == ["1", "40", "3.00", "0.406", "50.0%", "0:75.0%", "1:25.0%"]
    assert printed[2].split()[:5] == ["2", "20", "1.00", "1.000", "0.0%"]
    assert printed[3] == "2 layers: max/mean 2.00 on average, 3.00 at most (layer 1)"
    rows = pixels(png.read_bytes())
    cell = len(rows) // 3
    assert len(rows[0]) == 4 * cell
    dense, uneven, even = (rows[i * cell] for i in range(3))
    white = (255, 255, 255)
    assert set(dense) == {white}
    assert uneven[2 * cell] == white
    assert sum(uneven[0]) < sum(uneven[cell]) < sum(white)
    assert set(even) == {uneven[0]}


def test_the_file_beside_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "a.1.csv", [1, 3])
    assert run(tmp_path / "a.1.pt") == 0
    assert "1:75.0% 0:25.0%" in capsys.readouterr().out
    assert read_counts(tmp_path / "a.1.csv") == [[1, 3]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "does not begin with layer_id,expert_id,count"),
        ("a,b\n1,2\n", "does not begin with"),
        (HEADER, "has no counts"),
        (HEADER + "0,0,1\n0,1,x\n", "line 3, is not of three numbers"),
        (HEADER + "0,0\n", "line 2, is not"),
        (HEADER + "0,-1,2\n", "line 2, is not"),
        (HEADER + f"{10**9},{10**9},2\n", "names 1000000001 layers"),
        ("\x80", "does not begin with"),
    ],
)
def test_other_files_are_one_line(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "other.csv"
    path.write_text(text)
    assert run(path) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_what_is_not_there_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path / "none.pt") == 2
    assert "none.csv does not exist beside none.pt" in capsys.readouterr().err
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe")
    assert run(tmp_path / "bytes.csv") == 2
    path = write(tmp_path / "fine.csv", [1, 2])
    assert run(path, "--png", tmp_path / "no" / "folder.png") == 2
    assert "cannot be written" in capsys.readouterr().err


def test_nothing_chosen_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "empty.csv", [0, 0])
    assert run(path, "--png", tmp_path / "map.png") == 0
    assert "No expert was chosen." in capsys.readouterr().out
    assert heat_map([[0, 0]]).startswith(b"\x89PNG")
