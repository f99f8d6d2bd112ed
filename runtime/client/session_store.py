"""Sessions: a request's prompt can continue the context of an earlier request of its session.

A session is a tree of requests. Each request stores its own new tokens, its output, and how much of
its parent's context it keeps. When a request arrives, its whole prompt is put together from these.
The prefix cache finds the keys and values again, so a session itself takes four bytes of host
memory for each token, and no memory on the device.

Each tenant (see `runtime.client.tenant`) has sessions of its own. It cannot see the sessions of
others, and they do not count towards its limit.
"""

from __future__ import annotations

import secrets
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import msgspec

from runtime.client.tenant import TENANT, acting_for, fits_beside_others
from runtime.errors import InvalidRequest, Overloaded

if TYPE_CHECKING:
    from runtime.client.generation_stream import GenerationInput, GenerationStream

# The most sessions of one tenant.
MAX_SESSIONS = 1024
MAX_SESSION_TOKENS = 4 << 20
# The most tokens of all sessions together; they take 256 MiB.
MAX_TOKENS = 64 << 20
MAX_TURNS = 4096
MAX_ID_CHARS = 256
DEFAULT_TIMEOUT_S = 3600.0
MAX_TIMEOUT_S = 7 * 24 * 3600.0


class UnknownSession(InvalidRequest):
    """The tenant has no open session with this id."""

    status_code = 404


class SessionParams(msgspec.Struct, kw_only=True):
    """The field `session_params` of a request.

    Attributes:
        id: the session's id.
        rid: the request whose context is continued. Without it the request starts a new context;
            in a streaming session it continues the latest request.
        offset: number of tokens of the old context to keep; a negative number counts from its end.
        replace: whether requests that already continue `rid` are removed from the session first.
            Without `rid`, all requests are removed.
        drop_previous_output: whether to continue the prompt of `rid` without its output.
    """

    id: str | None = None
    rid: str | None = None
    offset: int | None = None
    replace: bool | None = None
    drop_previous_output: bool | None = None

    def or_none(self) -> SessionParams | None:
        """Return `self`, or `None` if no field is set.

        Some clients always send the empty object.
        """
        return None if self == SessionParams() else self


@dataclass(eq=False)
class Turn:
    """One request of a session.

    Attributes:
        num_kept: number of tokens of the parent's context with which the prompt begins.
        tokens: tokens that the request adds to them.
        output: tokens that were generated for the request.
    """

    session: Session
    rid: str
    parent: Turn | None
    num_kept: int
    tokens: array[int]
    output: array[int] = field(default_factory=lambda: array("i"))
    children: list[Turn] = field(default_factory=list)

    def prompt(self) -> array[int]:
        """Return the request's whole prompt: the kept context and its own tokens."""
        turns: list[Turn] = []
        turn: Turn | None = self
        while turn is not None:
            turns.append(turn)
            turn = turn.parent
        context = array("i")
        for each in reversed(turns):
            del context[each.num_kept :]
            context += each.tokens
            if each is not self:
                context += each.output
        return context

    def add_output(self, token_ids: list[int]) -> None:
        """Append generated tokens to the output."""
        self.output.extend(token_ids)
        self.session.num_tokens += len(token_ids)
        self.session.use()


class Session:
    """One session: a context that a client extends with each of its requests.

    Attributes:
        turns: the session's requests by name, in order.
        num_tokens: number of tokens stored for all requests.
        used_at: when the session was last used, in seconds of `clock`.
    """

    def __init__(
        self, capacity: int, timeout_s: float, clock: Callable[[], float], *, is_streaming: bool
    ) -> None:
        """Start without requests.

        Args:
            capacity: the most tokens of the session.
            timeout_s: seconds without use after which the session is closed.
            clock: returns the time in seconds.
            is_streaming: whether a request without `rid` continues the latest one.
        """
        self.capacity = capacity
        self.timeout_s = timeout_s
        self.is_streaming = is_streaming
        self.turns: dict[str, Turn] = {}
        self._clock = clock
        self.used_at = clock()
        self.num_tokens = 0

    def use(self) -> None:
        """Record that the session is used now."""
        self.used_at = self._clock()

    def add(self, rid: str, parent: Turn | None, num_kept: int, tokens: array[int]) -> Turn:
        """Add a request under the request that it continues; the arguments are fields of `Turn`."""
        turn = self.turns[rid] = Turn(self, rid, parent, num_kept, tokens)
        self.num_tokens += len(tokens)
        if parent is not None:
            parent.children.append(turn)
        return turn

    def forget(self, turn: Turn) -> list[str]:
        """Remove a request and all requests that continue it; return their names."""
        dropped, todo = [], [turn]
        while todo:
            each = todo.pop()
            todo += each.children
            if self.turns.pop(each.rid, None) is not None:
                dropped.append(each.rid)
                self.num_tokens -= len(each.tokens) + len(each.output)
        if turn.parent is not None:
            turn.parent.children.remove(turn)
        return dropped


class Sessions:
    """All open sessions of all tenants, bounded in number, tokens and age.

    The methods act on the sessions of the current tenant only.
    """

    def __init__(
        self,
        is_running: Callable[[str], bool],
        abort: Callable[[str], object],
        bos_token_id: int | None = None,
        max_tokens: int = MAX_TOKENS,
        clock: Callable[[], float] = time.monotonic,
        *,
        has_tenants: bool = False,
    ) -> None:
        """Start without sessions.

        Args:
            is_running: whether the current tenant has a running request of that name.
            abort: aborts the current tenant's request of that name.
            bos_token_id: id of the token that begins a text. It is removed from tokens that
                continue a context.
            max_tokens: most tokens of all sessions together.
            clock: returns the time in seconds.
            has_tenants: whether several tenants share this server. Then an unknown session is `not
                found` (404). Otherwise it is a bad request, as in SGLang, and closing it is not an
                error.
        """
        self._has_tenants = has_tenants
        self._clock = clock
        self._max_tokens = max_tokens
        self._bos_token_id = bos_token_id
        self._is_running = is_running
        self._abort = abort
        # The outer key is the tenant, the inner key the session's id.
        self._spaces: dict[str, dict[str, Session]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._spaces.values()))

    def __contains__(self, session_id: str) -> bool:
        return session_id in self._own()

    def open(
        self,
        capacity: int,
        session_id: str | None = None,
        *,
        streaming: bool = False,
        timeout_s: float | None = None,
    ) -> str:
        """Open a session and return its id.

        Args:
            capacity: the most tokens of the session. The API gives a number of characters, which is
                a bound for tokens too, because a token has at least one character.
            session_id: id that the caller chose; random if absent.
            streaming: whether a request without `rid` continues the latest one.
            timeout_s: seconds without use after which the session is closed; default one hour.

        Raises:
            InvalidRequest: the id is taken, or a value is out of range.
            Overloaded: too many sessions are open.
        """
        if capacity < 1:
            raise InvalidRequest(
                f"capacity_of_str_len must be at least 1, got {capacity}.",
                param="capacity_of_str_len",
            )
        timeout = DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s
        if not 0 < timeout <= MAX_TIMEOUT_S:
            raise InvalidRequest(
                f"timeout must be in (0, {MAX_TIMEOUT_S:.0f}] seconds, got {timeout_s}.",
                param="timeout",
            )
        if session_id is None:
            session_id = secrets.token_hex(16)
        if not 0 < len(session_id) <= MAX_ID_CHARS or not session_id.isprintable():
            raise InvalidRequest(
                f"session_id must be 1 to {MAX_ID_CHARS} printable characters.", param="session_id"
            )
        sessions = self._own()
        if session_id in sessions:
            raise InvalidRequest(f"The session {session_id!r} is open already.", param="session_id")
        if len(sessions) >= MAX_SESSIONS:
            raise Overloaded(f"{MAX_SESSIONS} sessions are open; close one first.")
        capacity = min(capacity, MAX_SESSION_TOKENS)
        sessions[session_id] = Session(capacity, timeout, self._clock, is_streaming=streaming)
        return session_id

    def close(self, session_id: str) -> bool:
        """Remove a session and return whether it was open. Its running requests go on.

        Raises:
            UnknownSession: the session was not open, and several tenants share this server.
        """
        was_open = self._own().pop(session_id, None) is not None
        if self._has_tenants and not was_open:
            raise UnknownSession(_no_session(session_id), param="session_id")
        return was_open

    def generate(
        self,
        params: SessionParams,
        item: GenerationInput,
        generate: Callable[[GenerationInput], GenerationStream],
    ) -> GenerationStream:
        """Run a request as part of a session; its output is added to the session.

        Args:
            params: the request's session parameters.
            item: the request; its `input_ids` are only the tokens that it adds.
            generate: admits a request and returns its stream.

        Raises:
            InvalidRequest: for the reasons of `add` and `generate`; the session is then unchanged.
        """
        turn = self.add(params, item.spec.rid, item.input_ids)
        try:
            stream = generate(replace(item, input_ids=turn.prompt().tolist()))
        except BaseException:
            turn.session.forget(turn)
            raise
        stream.turn = turn
        return stream

    def add(self, params: SessionParams, rid: str, input_ids: list[int]) -> Turn:
        """Add a request to its session and return it; `Turn.prompt` gives its whole prompt.

        Args:
            params: the request's session parameters.
            rid: the request's name, by which later requests may continue it.
            input_ids: the tokens that it adds to the context.

        Raises:
            InvalidRequest: the session or the continued request does not exist, the continued
                request still runs, or the session has no room.
        """
        session = self._session(params.id)
        parent = self._parent(session, params)
        if rid in session.turns:
            raise InvalidRequest(f"The session has a request {rid[:64]!r} already.", param="rid")
        tokens = array("i", input_ids)
        num_kept = 0
        if parent is not None:
            if tokens and tokens[0] == self._bos_token_id:
                del tokens[0]
            context = parent.prompt()
            if not params.drop_previous_output:
                context += parent.output
            num_kept = len(context[: params.offset] if params.offset else context)
        self._check_room(session, len(tokens))
        return session.add(rid, parent, num_kept, tokens)

    def _session(self, session_id: str | None) -> Session:
        session = self._own().get(session_id or "")
        if session is None:
            kind = UnknownSession if self._has_tenants else InvalidRequest
            raise kind(_no_session(session_id or ""), param="session_params")
        session.use()
        return session

    def _parent(self, session: Session, params: SessionParams) -> Turn | None:
        if params.rid is None and params.replace:
            for root in [turn for turn in session.turns.values() if turn.parent is None]:
                self._drop(session, root)
        if params.rid is None:
            if not session.is_streaming or not session.turns:
                return None
            parent = next(reversed(session.turns.values()))
        elif params.rid in session.turns:
            parent = session.turns[params.rid]
        else:
            raise InvalidRequest(
                f"The session has no request {params.rid[:64]!r}.", param="session_params"
            )
        if self._is_running(parent.rid):
            raise InvalidRequest(
                f"The request {parent.rid[:64]!r} has not finished yet.", param="session_params"
            )
        if params.replace:
            for child in list(parent.children):
                self._drop(session, child)
        return parent

    def _drop(self, session: Session, turn: Turn) -> None:
        for rid in session.forget(turn):
            if self._is_running(rid):
                self._abort(rid)

    def _check_room(self, session: Session, num_new: int) -> None:
        if session.num_tokens + num_new > session.capacity or len(session.turns) >= MAX_TURNS:
            raise InvalidRequest(
                f"The session is full: it may hold {session.capacity} tokens "
                f"(capacity_of_str_len) and {MAX_TURNS} requests; each keeps what it added and its "
                "output.",
                param="session_params",
            )
        held = {
            tenant: sum(each.num_tokens for each in sessions.values())
            for tenant, sessions in self._spaces.items()
        }
        own, everyone = held.get(TENANT.get(), 0), sum(held.values())
        if not fits_beside_others(num_new, own=own, everyone=everyone, most=self._max_tokens):
            raise Overloaded("The open sessions have too many tokens; close some first.")

    def _own(self) -> dict[str, Session]:
        """Close sessions that timed out; return the current tenant's open sessions by id."""
        self._close_old()
        return self._spaces.setdefault(TENANT.get(), {})

    def _close_old(self) -> None:
        now = self._clock()
        for tenant, sessions in self._spaces.items():
            with acting_for(tenant):
                for session_id, session in list(sessions.items()):
                    is_old = now - session.used_at > session.timeout_s
                    if is_old and not any(self._is_running(rid) for rid in session.turns):
                        del sessions[session_id]


def _no_session(session_id: str) -> str:
    return f"There is no open session {session_id[:64]!r}."
