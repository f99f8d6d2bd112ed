"""Hostile images and addresses beside running streams: each is refused, and streams are unaffected.

The numbers are those of `docs/reliability.md`. `test_probes.py` has a text model's answers, and
`tests/unit/media` tests each rule alone.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import httpx
import psutil
import pytest

from tests.faults.test_probes import LEAK
from tests.support.livez_prober import LivezProber
from tests.support.native import until_idle, until_running
from tests.support.neighbours import Neighbours, greedy
from tests.support.pictures import data_url, encoded, noise
from tests.support.seeing_model import prompt_with, seeing_model
from tests.support.server import ROOT, ServerProcess

BROKEN_DECODER = ROOT / "tests" / "support" / "broken_decoder"
CRASHES = (101, 101)
NUM_TRIES = 3


class Listener:
    """A port of this machine that must see no connection."""

    def __init__(self) -> None:
        self._sockets = [socket.create_server(("127.0.0.1", 0))]
        self.port = self._sockets[0].getsockname()[1]
        if socket.has_ipv6:
            self._sockets.append(socket.create_server(("::1", self.port), family=socket.AF_INET6))
        self.num_connections = 0
        for each in self._sockets:
            threading.Thread(target=self._count, args=[each], daemon=True).start()

    def _count(self, listening: socket.socket) -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            self.num_connections += 1
            connection.close()

    def close(self) -> None:
        for each in self._sockets:
            each.close()


@pytest.fixture(scope="module")
def listener() -> Iterator[Listener]:
    with closing(Listener()) as found:
        yield found


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("pictures")
    (folder / "out.png").symlink_to("/etc/hostname")
    os.mkfifo(folder / "pipe.png")
    args = ("--model-path", str(seeing_model()), "--allow-media-urls", "--media-root", str(folder))
    path = os.pathsep.join([str(BROKEN_DECODER), str(ROOT)])
    with ServerProcess(*args, PYTHONPATH=path) as made:
        yield made.wait_ready()


@pytest.fixture(scope="module")
def solo(server: ServerProcess) -> str:
    return greedy(server)


def generate(server: ServerProcess, image: str) -> httpx.Response:
    params = {"max_new_tokens": 4, "temperature": 0}
    body = {"text": prompt_with(1), "image_data": image, "sampling_params": params}
    return httpx.post(f"{server.url}/generate", json=body, timeout=120)


def chat(server: ServerProcess, image: str) -> httpx.Response:
    part = {"type": "image_url", "image_url": {"url": image}}
    body = {"messages": [{"role": "user", "content": [part]}], "max_tokens": 4}
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120)


def message(server: ServerProcess, image: str) -> httpx.Response:
    source = {"type": "url", "url": image}
    if image.startswith("data:"):
        source = {"type": "base64", "data": image.partition(",")[2]}
    content = [{"type": "image", "source": source}]
    body = {"model": "m", "messages": [{"role": "user", "content": content}], "max_tokens": 4}
    return httpx.post(f"{server.url}/v1/messages", json=body, timeout=120)


WAYS = (generate, chat, message)


def assert_refused(response: httpx.Response, words: str) -> None:
    assert response.status_code == 400, response.text[:300]
    content = response.json()
    text = content["error"]["message"] if "error" in content else content["message"]
    assert words in text, text
    assert len(response.text) < 2000
    assert not LEAK.search(response.text), response.text


def chunk(kind: bytes, content: bytes) -> bytes:
    check = zlib.crc32(kind + content)
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", check)


def bomb(side: int) -> bytes:
    """A PNG whose header says more than its thousandth holds."""
    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + chunk(b"IDAT", zlib.compress(bytes(2**24), 9))
        + chunk(b"IEND", b"")
    )


def animated(kind: str) -> bytes:
    frames = [noise(16, 16, seed=seed) for seed in range(40)]
    return encoded(frames[0], kind, save_all=True, append_images=frames[1:])


PICTURE = encoded(noise(200, 200), "JPEG")
# Each with a word of its refusal.
BOMBS: dict[str, tuple[bytes, str]] = {
    "one pixel": (encoded(noise(1, 1)), "4 to 32768"),
    "65,000 x 65,000": (bomb(65_000), "65000 x 65000"),
    "20,000 x 20,000": (bomb(20_000), "20000 x 20000"),
    # As many as are taken, but they are not there.
    "7,000 x 7,000": (bomb(7_000), "damaged or cut off"),
    "animated webp": (animated("WEBP"), "animated"),
    "animated png": (animated("PNG"), "animated"),
    "svg": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "PNG, JPEG, WebP"),
    "eps": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "PNG, JPEG, WebP"),
    "tiff": (encoded(noise(16, 16), "TIFF"), "PNG, JPEG, WebP"),
    "bmp": (encoded(noise(16, 16), "BMP"), "PNG, JPEG, WebP"),
    "jpeg 2000": (b"\0\0\0\x0cjP  \r\n\x87\n" + bytes(50), "PNG, JPEG, WebP"),
    "a sound": (b"OggS" + bytes(1000), "PNG, JPEG, WebP"),
    "cut off": (PICTURE[: len(PICTURE) // 2], "damaged or cut off"),
    "crashes the decoder": (encoded(noise(*CRASHES)), "cannot cope"),
}


def test_bombs(server: ServerProcess, solo: str) -> None:
    """Row 24."""
    with Neighbours(server) as neighbours:
        until_running(server)
        for at, (content, words) in enumerate(BOMBS.values()):
            assert_refused(WAYS[at % len(WAYS)](server, data_url(content)), words)
        assert server.client.get("/health").status_code == 200
        # One that is none, beside it.
        assert generate(server, data_url(PICTURE)).status_code == 200
    assert set(neighbours.texts) == {solo}
    until_idle(server)


def test_a_decoder_that_crashes_takes_nobody_along(server: ServerProcess, solo: str) -> None:
    """Many at once, with good ones between them."""
    assert generate(server, data_url(PICTURE)).status_code == 200
    before = sorted(server.child_pids())
    crash, fine = (
        data_url(encoded(noise(*CRASHES))),
        [data_url(encoded(noise(64, 64, seed=seed))) for seed in range(4)],
    )
    answers: list[httpx.Response] = []

    def ask(image: str) -> None:
        answers.append(generate(server, image))

    with Neighbours(server) as neighbours:
        threads = [
            threading.Thread(target=ask, args=[image]) for pair in fine for image in (crash, pair)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(each.status_code for each in answers) == [200] * 4 + [400] * 4
    assert set(neighbours.texts) == {solo}
    assert sorted(server.child_pids()) == before


def test_the_process_that_decodes_may_die(server: ServerProcess) -> None:
    assert generate(server, data_url(PICTURE)).status_code == 200
    decoders = [
        each
        for each in psutil.Process(server.process.pid).children()
        if "runtime.media.image_process" in each.cmdline()
    ]
    (decoder,) = decoders
    decoder.kill()
    assert generate(server, data_url(encoded(noise(80, 80, seed=80)))).status_code == 200


def test_addresses_that_lead_inside(server: ServerProcess, solo: str, listener: Listener) -> None:
    """Row 23, where the operator allows every public host."""
    port = listener.port
    hosts = [
        "localhost", "127.0.0.1", "127.1", "2130706433", "0x7f000001", "0", "[::1]",
        "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[64:ff9b::127.0.0.1]", "[::127.0.0.1]",
    ]  # fmt: skip
    probes = [(f"http://{host}:{port}/a.png", "cannot be fetched") for host in hosts]
    probes += [
        (f"http://pictures.example@127.0.0.1:{port}/", "user's name"),
        (f"http://127.0.0.1:{port}\\@pictures.example/", "plain ASCII"),
        (f"http://pictures.example\t@127.0.0.1:{port}/", "plain ASCII"),
        ("http://169.254.169.254/latest/meta-data/", "public network"),
        ("https://10.0.0.1/", "public network"),
        ("http://[fe80::1]/", "public network"),
        ("http://224.0.0.1/", "public network"),
        ("file:///etc/passwd", "under --media-root"),
        ("/etc/passwd", "under --media-root"),
        ("../../etc/passwd", "under --media-root"),
        ("out.png", "under --media-root"),
        ("pipe.png", "under --media-root"),
        ("ftp://127.0.0.1/a.png", "under --media-root"),
    ]
    with Neighbours(server) as neighbours:
        until_running(server)
        for at, (url, words) in enumerate(probes):
            assert_refused((generate, chat)[at % 2](server, url), words)
    assert set(neighbours.texts) == {solo}
    assert listener.num_connections == 0
    until_idle(server)


@pytest.mark.alone
@pytest.mark.slow
def test_the_loop_goes_on_beside_large_pictures(server: ServerProcess, solo: str) -> None:
    """24 million pixels six times, each a picture of its own."""
    large = [
        data_url(encoded(noise(600, 400, seed=seed).resize((6000, 4000)), "JPEG"))
        for seed in range(6)
    ]
    found = []
    with LivezProber(server) as prober:
        for _ in range(NUM_TRIES):
            with (
                Neighbours(server) as neighbours,
                prober.period() as period,
                ThreadPoolExecutor(len(large)) as pool,
            ):
                answers = list(pool.map(lambda each: chat(server, each), large))
            assert {each.status_code for each in answers} == {200}
            assert set(neighbours.texts) == {solo}
            found.append(period)
            # Once a machine may have stopped.
            if period.is_bearable:
                break
    assert found[-1].is_bearable, f"/livez took {', '.join(map(str, found))}"


def test_a_data_url_of_gigabytes_stops_at_the_body(server: ServerProcess) -> None:
    def body() -> Iterator[bytes]:
        yield b'{"text": "a", "image_data": "data:image/png;base64,'
        for _ in range(2**11):
            yield b"A" * 2**20

    with pytest.raises(httpx.HTTPError):  # noqa: PT012  either ends it
        headers = {"content-type": "application/json"}
        answer = httpx.post(f"{server.url}/generate", content=body(), headers=headers, timeout=60)
        assert answer.status_code == 413
        raise httpx.HTTPError("it was refused")
    assert server.client.get("/health").status_code == 200
