"""Files of pages: what was written comes back, also after a restart; everything else is ignored."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from runtime.cache.page_files import PageFiles

MINE, OTHER = b"m" * 32, b"o" * 32
SIZE = 1000
# With the header.
FILE_SIZE = SIZE + 96


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def page(number: int) -> memoryview:
    return memoryview(bytes([number]) * SIZE)


def read(files: PageFiles, number: int) -> bytes | None:
    target = bytearray(SIZE)
    return bytes(target) if files.read(key(number), memoryview(target)) else None


def path_of(folder: Path, number: int) -> Path:
    (found,) = folder.glob(f"*/{key(number).hex()}.kv")
    return found


def test_pages_come_back_after_a_restart(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "pages"
    first = PageFiles(folder, MINE, 10**6)
    for number in range(5):
        assert first.write(key(number), page(number))
    again = PageFiles(folder, MINE, 10**6)
    assert len(again) == 5
    assert again.num_bytes == 5 * FILE_SIZE
    assert [read(again, number) for number in range(5)] == [bytes(page(n)) for n in range(5)]
    assert key(9) not in again
    assert read(again, 9) is None
    # Only the owner may read what shows the prompts.
    assert path_of(folder, 0).stat().st_mode & 0o777 == 0o600
    assert path_of(folder, 0).parent.stat().st_mode & 0o777 == 0o700
    assert not list(folder.glob("*/*.unfinished"))


def test_another_model_finds_nothing(tmp_path: Path) -> None:
    PageFiles(tmp_path, MINE, 10**6).write(key(1), page(1))
    other = PageFiles(tmp_path, OTHER, 10**6)
    assert key(1) not in other
    # Nor does it believe a file that was moved to its folder.
    path_of(tmp_path, 1).rename(tmp_path / OTHER.hex()[:32] / f"{key(1).hex()}.kv")
    other = PageFiles(tmp_path, OTHER, 10**6)
    assert key(1) in other
    assert read(other, 1) is None
    assert key(1) not in other


DAMAGES = "a bit", "the end", "longer", "another key", "a link", "a pipe"


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_ignored_with_a_line_in_the_log(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    files = PageFiles(tmp_path, MINE, 10**6)
    for number in (1, 2):
        files.write(key(number), page(number))
    path = path_of(tmp_path, 1)
    content = bytearray(path.read_bytes())
    match damage:
        case "a bit":
            content[500] ^= 1
            path.write_bytes(content)
        case "the end":
            path.write_bytes(content[:-1])
        case "longer":
            path.write_bytes(content + b"x")
        case "another key":
            path_of(tmp_path, 2).replace(path)
        case "a link":
            path.unlink()
            path.symlink_to(path_of(tmp_path, 2))
        case "a pipe":
            path.unlink()
            os.mkfifo(path)
    assert read(files, 1) is None
    assert key(1) not in files
    assert caplog.text.count("Ignoring") == 1
    assert files.num_bytes == FILE_SIZE
    # It is written again.
    if damage != "a pipe":
        assert files.write(key(1), page(7))
        assert read(files, 1) == bytes(page(7))


def test_the_files_that_were_unused_for_longest_make_room(tmp_path: Path) -> None:
    PageFiles(tmp_path, OTHER, 10**6).write(key(8), page(8))
    os.utime(path_of(tmp_path, 8), (1, 1))
    note = tmp_path / MINE.hex()[:32] / "note.txt"
    files = PageFiles(tmp_path, MINE, 4 * FILE_SIZE)
    note.write_text("of the operator")
    for number in (1, 2, 3):
        assert files.write(key(number), page(number))
    assert files.num_bytes == 4 * FILE_SIZE
    # The order outlives the server; a clock may be too coarse to tell these files apart.
    for number in (1, 2, 3):
        os.utime(path_of(tmp_path, number), (number, number))
    read(files, 1)
    for number in (4, 5):
        assert files.write(key(number), page(number))
        assert files.num_bytes == 4 * FILE_SIZE
    # First the file of the other model, which was the oldest.
    assert not list(tmp_path.glob(f"*/{key(8).hex()}.kv"))
    assert [number for number in range(1, 6) if key(number) in files] == [1, 3, 4, 5]
    assert note.exists()
    again = PageFiles(tmp_path, MINE, 4 * FILE_SIZE)
    assert again.write(key(6), page(6))
    assert key(3) not in again
    assert key(1) in again
    assert not PageFiles(tmp_path, MINE, SIZE).write(key(7), page(7))


def test_a_folder_that_cannot_be_written_costs_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = PageFiles(tmp_path, MINE, 10**6)
    (tmp_path / MINE.hex()[:32]).rmdir()
    for number in (1, 2):
        assert not files.write(key(number), page(number))
    assert caplog.text.count("was not written") == 1
    assert files.num_bytes == len(files) == 0


def test_what_a_crash_left_is_removed_but_not_what_others_write(tmp_path: Path) -> None:
    folder = tmp_path / MINE.hex()[:32]
    folder.mkdir()
    old, new = folder / "1-1.unfinished", folder / "2-1.unfinished"
    for each in (old, new):
        each.write_bytes(b"x")
    os.utime(old, (1, 1))
    PageFiles(tmp_path, MINE, 10**6)
    assert not old.exists()
    assert new.exists()


def test_two_servers_write_the_same_pages(tmp_path: Path) -> None:
    servers = [PageFiles(tmp_path, MINE, 10**6) for _ in range(2)]
    at_once = threading.Barrier(len(servers))

    def write_all(files: PageFiles) -> list[int]:
        """Return the pages that were not written."""
        failed = []
        for number in range(60):
            at_once.wait(60)
            if not files.write(key(number), page(number)):
                failed.append(number)
        return failed

    with ThreadPoolExecutor(len(servers)) as threads:
        assert list(threads.map(write_all, servers)) == [[], []]
    for files in servers:
        assert all(read(files, number) == bytes(page(number)) for number in range(60))
    assert not list(tmp_path.glob("*/*.unfinished"))


def test_another_server_with_this_process_id_is_writing(tmp_path: Path) -> None:
    """As in two containers with one volume, in which each server is process 1."""
    folder = tmp_path / MINE.hex()[:32]
    folder.mkdir()
    others = [folder / f"{os.getpid()}-{number}.unfinished" for number in range(3)]
    for each in others:
        each.write_bytes(b"begun")
    files = PageFiles(tmp_path, MINE, 10**6)
    for number in range(3):
        assert files.write(key(number), page(number))
    assert all(each.read_bytes() == b"begun" for each in others)
