"""Fetching images: which addresses are connected to, how often, and how much is read."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import pytest

from runtime.errors import InvalidRequest, Overloaded
from runtime.media.image_source import MAX_IMAGE_BYTES
from runtime.media.media_policy import MediaPolicy
from runtime.media.remote_image import MAX_FETCHES, Fetcher, is_public

# All of 127.0.0.0/8 is this machine: one address stands for a public one, another for ours.
PUBLIC, PRIVATE = "127.0.0.2", "127.0.0.1"
ANY = MediaPolicy(any_domain=True)


@dataclass
class Site:
    """A server on one address that answers each path with what it was given."""

    address: str
    answers: dict[str, bytes | Callable[[asyncio.StreamWriter], object]]
    port: int = 0
    requests: list[bytes] = field(default_factory=list)
    num_connections: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            self.requests.append(head)
            answer = self.answers[head.split(b" ")[1].decode()]
            if callable(answer):
                await answer(writer)  # type: ignore[misc]
            else:
                writer.write(answer)
                await writer.drain()
        writer.close()


@contextlib.asynccontextmanager
async def site(address: str, **answers: object) -> AsyncIterator[Site]:
    found = Site(address, {f"/{name}": answer for name, answer in answers.items()})  # type: ignore[misc]
    server = await asyncio.start_server(found.serve, address, 0)
    found.port = server.sockets[0].getsockname()[1]
    async with server:
        yield found


def ok(content: bytes, *headers: str, length: int | None = None) -> bytes:
    lines = ["HTTP/1.1 200 OK", *headers, f"Content-Length: {length or len(content)}", "", ""]
    return "\r\n".join(lines).encode() + content


def redirect(to: str) -> bytes:
    return f"HTTP/1.1 302 Found\r\nLocation: {to}\r\nContent-Length: 0\r\n\r\n".encode()


class Names:
    """A resolver that counts, and may say something else each time."""

    def __init__(self, **names: list[list[str]]) -> None:
        self.names = {name.replace("_", "."): answers for name, answers in names.items()}
        self.asked: list[str] = []

    async def __call__(self, host: str, port: int) -> list[str]:
        self.asked.append(host)
        if host not in self.names:
            return [host]
        answers = self.names[host]
        return answers.pop(0) if len(answers) > 1 else answers[0]


def fetcher(
    policy: MediaPolicy = ANY,
    names: Names | None = None,
    timeout_s: float = 5,
    max_parallel: int = MAX_FETCHES,
) -> Fetcher:
    return Fetcher(
        policy,
        resolve=names or Names(),
        is_allowed=lambda address: address == PUBLIC or is_public(address),
        timeout_s=timeout_s,
        max_parallel=max_parallel,
    )


async def refused(fetch: Fetcher, url: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        await fetch.fetch(url, "image_data")
    assert caught.value.param == "image_data"
    assert PRIVATE not in caught.value.message


async def test_a_file_comes_as_it_is() -> None:
    async with site(PUBLIC, a=ok(b"picture")) as public:
        names = Names(pictures_example=[[PUBLIC]])
        url = f"http://pictures.example:{public.port}/a"
        assert await fetcher(names=names).fetch(url, "x") == b"picture"
    (head,) = public.requests
    assert f"Host: pictures.example:{public.port}\r\n".encode() in head
    assert b"Accept-Encoding: identity\r\n" in head


async def test_nothing_is_fetched_unless_it_is_allowed() -> None:
    async with site(PUBLIC, a=ok(b"picture")) as public:
        url = f"http://pictures.example:{public.port}/a"
        names = Names(pictures_example=[[PUBLIC]], sub_pictures_example=[[PUBLIC]])
        await refused(fetcher(MediaPolicy(), names), url, "--allow-media-domains")
        listed = MediaPolicy(domains=frozenset({"other.example", ".pictures.example"}))
        await refused(fetcher(listed, names), url, "not among --allow-media-domains")
        assert not names.asked
        assert not public.num_connections
        url = url.replace("//", "//sub.")
        assert await fetcher(listed, names).fetch(url, "x") == b"picture"


@pytest.mark.parametrize(
    "host",
    [
        "localhost", "127.0.0.1", "127.1", "2130706433", "0x7f.1", "[::1]", "[::ffff:127.0.0.1]",
        "[::ffff:7f00:1]", "0", "169.254.169.254", "metadata.internal", "10.0.0.7",
    ],
)  # fmt: skip
async def test_no_connection_to_what_is_not_public(host: str) -> None:
    """With the system's own resolver, where the host is no fake name."""
    async with site(PRIVATE, a=ok(b"secret")) as private:
        names = Names(metadata_internal=[["169.254.169.254"]])
        resolve = names if host == "metadata.internal" else None
        fetch = Fetcher(ANY, resolve=resolve, timeout_s=5)
        await refused(fetch, f"http://{host}:{private.port}/a", "public network|cannot be found")
        assert not private.num_connections


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://pictures.example@127.0.0.1/a", "user's name"),
        ("http://a:b@pictures.example/a", "user's name"),
        ("http://127.0.0.1\\@pictures.example/a", "plain ASCII"),
        ("http://pictures.example\\a", "plain ASCII"),
        ("http://pictures.example/a b", "plain ASCII"),
        ("http://pictures.example/a\r\nHost: x", "plain ASCII"),
        ("http://b\u00fccher.example/", "plain ASCII"),
        ("http://pictures.example:99999/a", "cannot be read"),
        ("http:///a", "no proper host"),
        ("http://-a.example/", "no proper host"),
        ("http://a%2eexample/", "no proper host"),
        ("http://[::1/a", "cannot be read"),
        ("ftp://pictures.example/a", "http:// or https://"),
        ("http://pictures.example/" + "a" * 9000, "plain ASCII"),
    ],
)
async def test_odd_addresses(url: str, words: str) -> None:
    names = Names(pictures_example=[[PUBLIC]])
    await refused(fetcher(names=names), url, words)
    assert not names.asked


async def test_a_name_is_resolved_once_and_the_connection_goes_there() -> None:
    """The second answer of the resolver would lead inside."""
    async with site(PUBLIC, a=ok(b"picture")) as public, site(PRIVATE, a=ok(b"secret")) as private:
        names = Names(rebinding_example=[[PUBLIC], [PRIVATE]])
        url = f"http://rebinding.example:{public.port}/a"
        assert await fetcher(names=names).fetch(url, "x") == b"picture"
        assert names.asked == ["rebinding.example"]
        await refused(fetcher(names=names), url, "public network")
        assert not private.num_connections


async def test_one_address_that_is_not_public_is_one_too_many() -> None:
    async with site(PRIVATE, a=ok(b"secret")) as private, site(PUBLIC, a=ok(b"picture")) as public:
        names = Names(mixed_example=[[PUBLIC, PRIVATE]])
        for port in (private.port, public.port):
            url = f"http://mixed.example:{port}/a"
            await refused(fetcher(names=names), url, "public network")
        assert private.num_connections + public.num_connections == 0


async def test_redirects_are_checked_like_addresses() -> None:
    async with site(PRIVATE, a=ok(b"secret")) as private, site(PUBLIC) as public:
        names = Names(pictures_example=[[PUBLIC]], inside_example=[[PRIVATE]])
        here = f"http://pictures.example:{public.port}"
        public.answers |= {
            "/fine": redirect("/a"),
            "/a": ok(b"picture"),
            "/inside": redirect(f"http://127.0.0.1:{private.port}/a"),
            "/name": redirect(f"http://inside.example:{private.port}/a"),
            "/file": redirect("file:///etc/passwd"),
            "/user": redirect(f"http://pictures.example@127.0.0.1:{private.port}/a"),
            "/elsewhere": redirect(f"http://other.example:{public.port}/a"),
            "/round": redirect("/round"),
        }
        assert await fetcher(names=names).fetch(f"{here}/fine", "x") == b"picture"
        for path, words in (
            ("inside", "public network"),
            ("name", "public network"),
            ("file", "http:// or https://"),
            ("user", "user's name"),
            ("round", "redirects more than 3 times"),
        ):
            await refused(fetcher(names=names), f"{here}/{path}", words)
        listed = MediaPolicy(domains=frozenset({"pictures.example"}))
        await refused(fetcher(listed, names), f"{here}/elsewhere", "--allow-media-domains")
        assert sum(b"/round" in head for head in public.requests) == 4
        assert not private.num_connections


async def test_bounds_of_size() -> None:
    async def endless(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        part = b"100000\r\n" + bytes(2**20) + b"\r\n"
        while True:
            writer.write(part)
            await writer.drain()

    async with site(PUBLIC, endless=endless) as public:
        names = Names(pictures_example=[[PUBLIC]])
        here = f"http://pictures.example:{public.port}"
        public.answers["/told"] = ok(b"x", length=MAX_IMAGE_BYTES + 1)
        public.answers["/zip"] = ok(b"x" * 9, "Content-Encoding: gzip")
        public.answers["/gone"] = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"
        public.answers["/junk"] = b"nonsense\r\n\r\n"
        for path, words in (
            ("endless", "at most 20 MiB"),
            ("told", "at most 20 MiB"),
            ("zip", "compressed"),
            ("gone", "status 404"),
            ("junk", "connection failed"),
        ):
            await refused(fetcher(names=names, timeout_s=60), f"{here}/{path}", words)
        await refused(fetcher(names=names), "http://pictures.example:1/a", "connection failed")


async def test_a_server_that_drips_is_left() -> None:
    dripped, never = asyncio.Event(), asyncio.Event()

    async def drip(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
        while True:
            writer.write(b"x")
            await writer.drain()
            dripped.set()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.01):
                    await never.wait()

    async with site(PUBLIC, drip=drip) as public:
        names = Names(pictures_example=[[PUBLIC]])
        url = f"http://pictures.example:{public.port}/drip"
        await refused(fetcher(names=names, timeout_s=0.5), url, r"not there within 0.5 s")
        assert dripped.is_set()


async def test_so_many_at_a_time() -> None:
    began, held = asyncio.Event(), asyncio.Event()

    async def wait(writer: asyncio.StreamWriter) -> None:
        began.set()
        await held.wait()
        writer.write(ok(b"picture"))
        await writer.drain()

    async with site(PUBLIC, wait=wait) as public:
        fetch = fetcher(names=Names(pictures_example=[[PUBLIC]]), max_parallel=1)
        url = f"http://pictures.example:{public.port}/wait"
        first = asyncio.create_task(fetch.fetch(url, "x"))
        await began.wait()
        with pytest.raises(Overloaded, match="too many"):
            await fetch.fetch(url, "x")
        held.set()
        assert await first == b"picture"
        assert await fetch.fetch(url, "x") == b"picture"
