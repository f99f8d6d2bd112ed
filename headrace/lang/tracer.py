"""Runs a program without sending requests, and records the expressions that it appends.

Arguments without a value are replaced by placeholders.
"""

from __future__ import annotations

import contextlib
import itertools
import uuid
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NoReturn, Self

from headrace.lang import ir
from headrace.lang.backend.choose import find_backend
from headrace.lang.chat_template import ChatTemplate

if TYPE_CHECKING:
    from headrace.lang.backend.base import BaseBackend
    from headrace.lang.function import SglFunction

_scope: ContextVar[TracerState | None] = ContextVar("headrace_tracing", default=None)


def current() -> TracerState | None:
    """Return the trace in which the caller runs, or None."""
    return _scope.get()


class StopTracing(Exception):
    """Ends a trace, because the program's function needs a value that the trace does not have."""


class SglArgument(ir.SglExpr):
    """A placeholder for an argument or variable whose value is unknown in the trace."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        """Create the placeholder for the name."""
        self.name = name

    def _unknown(self, *_: object) -> NoReturn:
        raise StopTracing(f"The body reads the argument {self.name!r}.")

    __bool__ = __len__ = __int__ = __float__ = __index__ = __iter__ = __getitem__ = _unknown

    def __format__(self, spec: str) -> NoReturn:
        raise TypeError(f"The argument {self.name!r} has no text while its program is traced.")

    def __str__(self) -> str:
        raise TypeError(f"The argument {self.name!r} has no text while its program is traced.")

    def __repr__(self) -> str:
        return f"Argument({self.name})"

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)


class Node:
    """An expression that a traced program appended, linked to the expression before it."""

    def __init__(self, node_id: int, expression: ir.SglExpr, previous: Node | None, pid: str):
        """Store the expression and the node before it."""
        self.node_id = node_id
        self.expression = expression
        self.prev_node = previous
        self.pid = pid

    def __repr__(self) -> str:
        return f"%{self.node_id} = {self.expression!r}"

    def print_graph_dfs(self) -> str:
        """Return the chain of nodes up to this one as text, one line each."""
        chain: list[Node] = []
        node: Node | None = self
        while node is not None:
            chain.append(node)
            node = node.prev_node
        lines = []
        for node in reversed(chain):
            previous = f"%{node.prev_node.node_id}" if node.prev_node else ""
            lines.append(f"%{node.node_id} = {node.expression!r} ({previous})")
        return "\n".join(lines)


class TracerState:
    """Takes the place of a program's state while the program is traced.

    Attributes:
        nodes: the appended expressions.
        last_node: the last node, or the parent's last node if there is none.
        variables: placeholders of variables by name.
        child_states: states of children of `fork`, and of other programs that the function calls.
        ret_value: the value that the function returned.
    """

    def __init__(
        self, template: ChatTemplate, parent: TracerState | None = None, pid: str | None = None
    ) -> None:
        """Begin without nodes; a child continues after the last node of its parent."""
        self.pid = pid or uuid.uuid4().hex
        self.chat_template = template
        self.nodes: list[Node] = []
        self.last_node: Node | None = parent.last_node if parent else None
        self.variables: dict[str, Any] = dict(parent.variables) if parent else {}
        self.child_states: list[TracerState] = []
        self.messages_: list[dict[str, Any]] = list(parent.messages_) if parent else []
        self.cur_role: str | None = parent.cur_role if parent else None
        self.ret_value: Any = None
        self._ids: itertools.count[int] = parent._ids if parent else itertools.count()

    def flatten_nodes(self) -> list[Node]:
        """Return all nodes: those of this state, then those of its children."""
        found = list(self.nodes)
        for child in self.child_states:
            found.extend(child.flatten_nodes())
        return found

    # ---- the operations of a body on a state ----

    def __iadd__(self, other: Any) -> Self:
        if other is None:
            raise ValueError("None cannot be appended to a program.")
        if isinstance(other, _Traced) and other.state is self:
            return self
        for part in ir.as_expression(other).parts():
            self._append(part)
        return self

    def role(self, name: str, expr: Any = None) -> Any:
        """Record a whole turn of the role `name`, or return a context manager for one."""
        if expr is None:
            return self._scope(ir.SglRoleBegin(name), ir.SglRoleEnd(name))
        whole = ir.SglExprList([ir.SglRoleBegin(name), ir.as_expression(expr), ir.SglRoleEnd(name)])
        self += whole
        return _Traced(whole, self)

    def system(self, expr: Any = None) -> Any:
        """Record a system turn, or return a context manager for one."""
        return self.role("system", expr)

    def user(self, expr: Any = None) -> Any:
        """Record a user turn, or return a context manager for one."""
        return self.role("user", expr)

    def assistant(self, expr: Any = None) -> Any:
        """Record an assistant turn, or return a context manager for one."""
        return self.role("assistant", expr)

    def var_scope(self, name: str) -> Any:
        """Return a context manager; the text recorded in its block becomes the variable `name`."""
        return self._scope(ir.SglVarScopeBegin(name), ir.SglVarScopeEnd(name))

    @contextlib.contextmanager
    def _scope(self, begin: ir.SglExpr, end: ir.SglExpr) -> Generator[None, None, None]:
        self._append(begin)
        try:
            yield
        finally:
            self._append(end)

    def __getitem__(self, name: Any) -> Any:
        return self.variables[str(name.name if isinstance(name, ir.SglGen) else name)]

    get_var = value = __getitem__

    def __setitem__(self, name: str, value: Any) -> None:
        self.variables[name] = value

    set_var = __setitem__

    def __contains__(self, name: object) -> bool:
        return name in self.variables

    def fork(
        self,
        size: int = 1,
        position_ids_offset: list[int] | None = None,  # noqa: ARG002
    ) -> list[TracerState]:
        """Return the traces of `size` new children."""
        children = [TracerState(self.chat_template, self) for _ in range(size)]
        self.child_states.extend(children)
        return children

    def __getattr__(self, name: str) -> NoReturn:
        raise StopTracing(f"A trace has no {name!r}.")

    def trace_child(
        self, function: SglFunction[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Trace another program that the traced function calls, and return its state."""
        child = TracerState(self.chat_template)
        self.child_states.append(child)
        _run(function, child, args, kwargs)
        return child

    # ---- nodes ----

    def _append(self, part: ir.SglExpr) -> None:
        if isinstance(part, ir.SglRoleBegin):
            self._begin_role(part.role)
        elif isinstance(part, ir.SglRoleEnd):
            _, suffix = self.chat_template.get_prefix_and_suffix(part.role, self.messages_)
            self._add(ir.SglConstantText(suffix))
            self.messages_.append({"role": part.role, "content": ""})
            self.cur_role = None
        else:
            self._add(part)
            for name in ir.names_set(part):
                self.variables[name] = SglArgument(name)

    def _begin_role(self, role: str) -> None:
        template = self.chat_template
        if self.cur_role is not None:
            raise ValueError(f"The turn of {role!r} begins inside the turn of {self.cur_role!r}.")
        if role != "system" and not self.messages_ and template.default_system_prompt is not None:
            turns = [{"role": "system", "content": None}]
            self._add(ir.SglConstantText(template.get_prompt(turns)))
            self.messages_.append({"role": "system", "content": template.default_system_prompt})
        prefix, _ = template.get_prefix_and_suffix(role, self.messages_)
        self._add(ir.SglConstantText(prefix))
        self.cur_role = role

    def _add(self, part: ir.SglExpr) -> None:
        self.last_node = Node(next(self._ids), part, self.last_node, self.pid)
        self.nodes.append(self.last_node)


class _Traced(ir.SglExprList):
    __slots__ = ("state",)

    def __init__(self, expression: ir.SglExpr, state: TracerState) -> None:
        super().__init__([expression])
        self.state = state


def _run(
    function: SglFunction[..., Any],
    state: TracerState,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> None:
    if function.is_async:
        raise TypeError("An async def program cannot be traced.")
    given = {**dict(zip(function.arg_names, args, strict=False)), **kwargs}
    required = function.arg_names[: len(function.arg_names) - len(function.arg_defaults)]
    for name in required:
        if name not in given and name not in function.bind_arguments:
            given[name] = SglArgument(name)
    state.ret_value = function.call_body(state, (), given)


def _template(backend: Any) -> ChatTemplate:
    from headrace.lang.backend.base import BaseBackend

    found: BaseBackend = find_backend(backend) or BaseBackend()
    return found.get_chat_template()


def trace(
    function: SglFunction[..., Any], arguments: Mapping[str, Any], backend: Any
) -> TracerState:
    """Trace a program and return its trace; missing arguments become placeholders."""
    state = TracerState(_template(backend))
    token = _scope.set(state)
    try:
        _run(function, state, (), arguments)
    finally:
        _scope.reset(token)
    return state


def constant_prefix(
    function: SglFunction[..., Any], arguments: Mapping[str, Any], backend: BaseBackend
) -> str:
    """Return the constant text with which a program begins.

    If the function raises an exception, it is ignored, and only the text before it counts.
    """
    state = TracerState(_template(backend))
    token = _scope.set(state)
    try:
        _run(function, state, (), arguments)
    except Exception:
        # The function may raise any exception because of a placeholder; earlier nodes are valid.
        pass
    finally:
        _scope.reset(token)
    return "".join(_constants(state.nodes))


def _constants(nodes: Sequence[Node]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node.expression, ir.SglConstantText):
            yield node.expression.value
        elif not isinstance(node.expression, (ir.SglVarScopeBegin, ir.SglVarScopeEnd)):
            return
