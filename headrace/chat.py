"""`headrace chat`: a chat in the terminal with a running server, through its OpenAI routes."""

from __future__ import annotations

import contextlib
import json
import ssl
from collections.abc import Generator, Iterable, Iterator
from typing import Any, NamedTuple, TextIO

import httpx

HELP = """\
/clear   forget the conversation
/help    this text
/exit    leave, like Ctrl-D
Ctrl-C   stop the answer
"""
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"
_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


class ChatFailed(Exception):
    """The server cannot be reached, or refuses a request; the message is written for the user."""


class Piece(NamedTuple):
    """A piece of streamed text, which belongs either to the answer or to the model's reasoning."""

    text: str
    is_reasoning: bool


def connect(url: str, api_key: str | None = None) -> httpx.Client:
    """Create a client for the server at `url`, which may end in `/v1`.

    Raises:
        ChatFailed: `url` is not an HTTP address.
    """
    try:
        base = httpx.URL(url.rstrip("/").removesuffix("/v1"))
    except httpx.InvalidURL:
        raise ChatFailed(f"{url} is not a server's address.") from None
    if base.scheme not in ("http", "https") or not base.host:
        raise ChatFailed(f"{url} is not a server's address; the form is http://HOST:PORT.")
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    return httpx.Client(
        base_url=base,
        headers=headers,
        # Only connecting has a time limit; an answer has none.
        timeout=httpx.Timeout(None, connect=5.0),
        # Proxies from the environment are ignored for this machine, whose ports they cannot reach.
        trust_env=base.host not in _LOOPBACK,
        # Trust the certificate authorities of this machine, or of the file in SSL_CERT_FILE.
        verify=ssl.create_default_context(),
    )


class ChatSession:
    """A conversation with a server: its messages, and the options of its requests.

    Attributes:
        messages: the messages that the next request sends, beginning with the system message.
        model: the model name that requests send.
    """

    def __init__(
        self,
        client: httpx.Client,
        *,
        model: str | None = None,
        system: str | None = None,
        thinking: bool | None = None,
        max_tokens: int | None = None,
        temperature: float | None = None,
    ) -> None:
        """Begin an empty conversation; without `model`, ask the server for its model's name.

        Raises:
            ChatFailed: the server does not answer.
        """
        self._client = client
        self._system = system
        self._options: dict[str, Any] = {}
        if thinking is not None:
            # Some chat templates read the one name of this switch, and some the other.
            self._options["chat_template_kwargs"] = {
                "enable_thinking": thinking,
                "thinking": thinking,
            }
        if max_tokens is not None:
            self._options["max_tokens"] = max_tokens
        if temperature is not None:
            self._options["temperature"] = temperature
        self.messages: list[dict[str, str]] = []
        self.clear()
        self.model = model or self._served_model()

    @property
    def url(self) -> str:
        """The server's address."""
        return str(self._client.base_url).rstrip("/")

    def clear(self) -> None:
        """Remove all messages except the system message."""
        self.messages = [{"role": "system", "content": self._system}] if self._system else []

    def ask(self, question: str) -> Generator[Piece, None, None]:
        """Send a question and yield the answer as it arrives.

        If the caller stops reading early, the text so far stays in the conversation as the answer.
        If the request fails, or the caller stops before any text, the question is removed.

        Raises:
            ChatFailed: the server refuses, or the connection breaks.
        """
        self.messages.append({"role": "user", "content": question})
        body = {
            "model": self.model,
            "messages": self.messages,
            "stream": True,
            **self._options,
        }
        answer: list[str] = []
        try:
            for delta in self._deltas(body):
                if delta.get("reasoning_content"):
                    yield Piece(delta["reasoning_content"], is_reasoning=True)
                if delta.get("content"):
                    answer.append(delta["content"])
                    yield Piece(delta["content"], is_reasoning=False)
        except ChatFailed:
            self.messages.pop()
            raise
        except BaseException:
            if answer:
                self._remember(answer)
            else:
                self.messages.pop()
            raise
        self._remember(answer)

    def _remember(self, answer: list[str]) -> None:
        self.messages.append({"role": "assistant", "content": "".join(answer)})

    def _deltas(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        with (
            self._failures(),
            self._client.stream("POST", "/v1/chat/completions", json=body) as response,
        ):
            if response.status_code != 200:
                response.read()
                raise ChatFailed(refusal(response))
            for content in _events(response.iter_bytes()):
                if "error" in content:
                    raise ChatFailed(str(content["error"].get("message", "the answer failed")))
                for choice in content["choices"]:
                    yield choice["delta"]

    def _served_model(self) -> str:
        with self._failures():
            response = self._client.get("/v1/models")
            if response.status_code != 200:
                raise ChatFailed(refusal(response))
            return str(response.json()["data"][0]["id"])

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            if "CERTIFICATE_VERIFY_FAILED" in str(error):
                raise ChatFailed(
                    f"The certificate of {self.url} is not trusted: {error}. The variable "
                    "SSL_CERT_FILE names a file of authorities to trust."
                ) from None
            raise ChatFailed(
                f"No server answers at {self.url}. Start one with `headrace serve`, or say where "
                "it is with --url."
            ) from None
        except httpx.HTTPError:
            raise ChatFailed(f"The connection to {self.url} broke.") from None
        except (ValueError, LookupError, TypeError):
            raise ChatFailed(f"The server at {self.url} does not speak OpenAI's API.") from None


def refusal(response: httpx.Response) -> str:
    """Return the message of an error response, with a hint if the server needs a key."""
    try:
        body = response.json()
        error = body.get("error", body)
        message = error if isinstance(error, str) else error["message"]
    except (ValueError, LookupError, TypeError, AttributeError):
        message = f"The server answered {response.status_code}."
    if response.status_code == 401:
        return f"{message}: the server needs a key; pass it with --api-key."
    return str(message)


def _events(chunks: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    # httpx's own line iterator is not used: it also splits at characters that JSON strings may
    # hold.
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data: "):
                if line[6:].strip() == b"[DONE]":
                    return
                yield json.loads(line[6:])


def converse(session: ChatSession, source: TextIO, out: TextIO, log: TextIO) -> int:
    """Read questions from `source` and write answers to `out` until the input ends.

    On a terminal this is a dialogue with commands, which also shows the model's reasoning. For
    piped input, each line is a question, and only answers are written.

    Returns:
        The exit status of the command.
    """
    if not source.isatty():
        return _answer_lines(session, source, out)
    with contextlib.suppress(ImportError):
        # Importing `readline` gives `input` arrow keys and a history.
        import readline  # noqa: F401
    out.write(f"{session.model} at {session.url}. /help lists the commands, Ctrl-D leaves.\n")
    while True:
        try:
            line = input("\n> ").strip()
        except EOFError:
            out.write("\n")
            return 0
        except KeyboardInterrupt:
            out.write("\n(Ctrl-D leaves)")
            continue
        if line in ("/exit", "/quit"):
            return 0
        if line.startswith("/"):
            out.write(_command(session, line))
        elif line:
            try:
                _show(session.ask(line), out, colors=out.isatty())
            except ChatFailed as error:
                log.write(f"\nheadrace: {error}\n")
                log.flush()


def _command(session: ChatSession, line: str) -> str:
    if line == "/clear":
        session.clear()
        return "(the conversation is forgotten)\n"
    if line == "/help":
        return HELP
    return f"(no command {line.split()[0]}; /help lists them)\n"


def _answer_lines(session: ChatSession, source: TextIO, out: TextIO) -> int:
    for line in source:
        if line.strip():
            for piece in session.ask(line.strip()):
                if not piece.is_reasoning:
                    out.write(piece.text)
                    out.flush()
            out.write("\n")
            out.flush()
    return 0


def _show(pieces: Generator[Piece, None, None], out: TextIO, *, colors: bool) -> None:
    was_reasoning = False
    try:
        for piece in pieces:
            if piece.is_reasoning != was_reasoning:
                was_reasoning = piece.is_reasoning
                if colors:
                    out.write(_DIM if was_reasoning else _PLAIN)
                if not was_reasoning:
                    out.write("\n\n")
            out.write(piece.text)
            out.flush()
    except KeyboardInterrupt:
        out.write(" (stopped)")
    finally:
        # Closing the generator closes the connection, and the server stops generating.
        pieces.close()
        if colors:
            out.write(_PLAIN)
        out.write("\n")
        out.flush()
