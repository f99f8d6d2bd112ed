"""Finds out whether a chat template is harmless, so that it may be rendered in this process.

A template is harmless if it has only constructs whose cost grows no faster than the request's
values and the written text. A template with any other construct is rendered in a process that can
be killed, although it may not be hostile. The less obvious rules exclude:

- operations that are short to write and expensive to run: powers, padding, repetition, `slice`;
- containers that grow inside the template, because one may hold the same text many times;
- calls of functions that are not known by name.
"""

from __future__ import annotations

import re

from jinja2 import nodes

from openai_api.template_kinds import NUMBER_FILTERS, TEXT_FILTERS, TEXT_METHODS, Kind, Kinds

MAX_LOOP_DEPTH = 4
# Limits of constants in arguments: the largest number, and the longest text.
_MAX_ARGUMENT = 100
_MAX_FACTOR = 1000


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_PLAIN = (
    *(nodes.Template, nodes.Output, nodes.TemplateData, nodes.If, nodes.Continue, nodes.Break),
    *(nodes.Assign, nodes.AssignBlock, nodes.FilterBlock, nodes.Macro, nodes.With, nodes.NSRef),
    *(nodes.Const, nodes.And, nodes.Or, nodes.Not, nodes.Compare, nodes.Operand, nodes.CondExpr),
    *(nodes.Getattr, nodes.Getitem, nodes.Slice, nodes.Concat, nodes.Neg, nodes.Pos, nodes.Sub),
    *(nodes.Div, nodes.FloorDiv, nodes.Keyword, nodes.Pair),
)
_TESTS = _words(
    "defined undefined none string mapping iterable sequence number integer float boolean true "
    "false eq equalto == ne != lt lessthan < le <= gt greaterthan > ge >= in odd even sameas"
)
_SELECTIONS = _words("select reject selectattr rejectattr")
_FILTERS = (
    _words("first last list default d items reverse safe map")
    | TEXT_FILTERS
    | NUMBER_FILTERS
    | _SELECTIONS
)
_METHODS = TEXT_METHODS | _words(
    "startswith endswith removeprefix removesuffix split rsplit splitlines find rfind index count "
    "isdigit isalpha isspace isupper islower items keys values get"
)
_FUNCTIONS = _words("namespace raise_exception strftime_now")
# Names that Jinja defines inside a macro, besides its parameters.
_HIDDEN = _words("varargs kwargs caller self super")


class _Doubt(Exception):
    def __init__(self, what: str, node: nodes.Node) -> None:
        super().__init__(f"line {node.lineno} uses {what}")


def find_doubt(tree: nodes.Template) -> str | None:
    """Return the first construct that is not known to be harmless, with its line.

    Returns:
        A text for the log; `None` if the template is harmless.
    """
    try:
        _Check(tree).run()
    except _Doubt as doubt:
        return str(doubt)
    except RecursionError:
        return "it nests too deep"
    return None


class _Check:
    def __init__(self, tree: nodes.Template) -> None:
        self._tree = tree
        self._kinds = Kinds(tree)
        # The position of each macro. A macro may call only macros before it, so there is no
        # recursion.
        self._macros: dict[str, int] = {}

    def run(self) -> None:
        """Raise `_Doubt` at the first construct that is not known to be harmless."""
        for position, macro in enumerate(self._tree.find_all(nodes.Macro)):
            if macro.name in {*self._macros, *self._kinds.stored, *_FUNCTIONS}:
                raise _Doubt(f"the name {macro.name} twice", macro)
            self._macros[macro.name] = position
        self._walk(self._tree, None, 0, len(self._macros))

    def _walk(
        self, node: nodes.Node, parent: nodes.Node | None, depth: int, num_callable: int
    ) -> None:
        """Check `node`, which is in `depth` loops and may call the first `num_callable` macros."""
        self._check(node, parent, num_callable)
        if isinstance(node, nodes.For):
            depth += 1
            if depth > MAX_LOOP_DEPTH:
                raise _Doubt(f"more than {MAX_LOOP_DEPTH} nested loops", node)
        elif isinstance(node, nodes.Macro):
            num_callable = self._macros[node.name]
        for child in node.iter_child_nodes():
            if not (isinstance(node, nodes.CallBlock) and child is node.call):
                self._walk(child, node, depth, num_callable)

    def _check(self, node: nodes.Node, parent: nodes.Node | None, num_callable: int) -> None:
        match node:
            case nodes.Filter() | nodes.Test() | nodes.Call() if _has_spread(node):
                raise _Doubt("a call with * or **", node)
            case nodes.Filter():
                is_known, what = _is_known_filter(node), f"the filter {node.name}"
            case nodes.Test():
                is_known, what = node.name in _TESTS, f"the test {node.name}"
            case nodes.Call():
                is_known, what = self._is_known_call(node, num_callable)
            case nodes.Name():
                is_known, what = node.name not in _HIDDEN, f"the name {node.name}"
            case nodes.List() | nodes.Tuple() | nodes.Dict():
                is_known = _is_constant(node) or _is_used_at_once(node, parent)
                what = "a list, tuple or dict of values"
            case nodes.Add() | nodes.Mul() | nodes.Mod():
                is_known = self._is_known_operation(node)
                what = f"{node.operator} between values of unknown type"
            case nodes.CallBlock(call=nodes.Call(node=nodes.ExtensionAttribute())):
                # The block `{% generation %}`, the only Jinja extension that templates may use.
                is_known, what = True, ""
            case _:
                is_known = isinstance(node, (nodes.For, *_PLAIN))
                what = type(node).__name__.lower()
        if not is_known:
            raise _Doubt(what, node)

    def _is_known_operation(self, node: nodes.Add | nodes.Mul | nodes.Mod) -> bool:
        left, right = self._kinds.of(node.left), self._kinds.of(node.right)
        if isinstance(node, nodes.Add):
            # One operand is a text or a number, so this does not join two lists.
            return bool({left, right} & {Kind.TEXT, Kind.NUMBER})
        if isinstance(node, nodes.Mod):
            return left is Kind.NUMBER or isinstance(node.left, nodes.Const)
        factors = [each.value for each in (node.left, node.right) if isinstance(each, nodes.Const)]
        is_bounded = any(not isinstance(f, str) and abs(f) <= _MAX_FACTOR for f in factors)
        # A repeated text is harmless: the sandbox checks its length before making it.
        return Kind.TEXT in (left, right) or (left is right is Kind.NUMBER and is_bounded)

    def _is_known_call(self, node: nodes.Call, num_callable: int) -> tuple[bool, str]:
        match node.node:
            case nodes.Getattr(node=owner, attr=attr):
                is_known = attr in _METHODS and (attr != "join" or _is_small(owner))
                return is_known, f"the method {attr}"
            case nodes.Name(name=name) if name in self._macros:
                return self._macros[name] < num_callable, f"the macro {name} before its end"
            case nodes.Name(name=name):
                is_known = name in _FUNCTIONS - self._kinds.stored
                if name == "strftime_now":
                    is_known = is_known and _is_time_format(node)
                return is_known, f"the function {name}"
        return False, "a call of something without a name"


def _is_known_filter(node: nodes.Filter) -> bool:
    values, keywords = list(node.args), [each.value for each in node.kwargs]
    match node.name:
        case "map":
            names = TEXT_FILTERS | NUMBER_FILTERS
            return _are_names(values, names) and len(values) < 2 and all(map(_is_small, keywords))
        case "select" | "reject":
            return _are_names(values[:1], _TESTS) and not keywords
        case "selectattr" | "rejectattr":
            return _are_names(values[1:2], _TESTS) and not keywords
        case "join" | "tojson":
            return all(map(_is_small, [*values, *keywords]))
    return node.name in _FILTERS


def _are_names(values: list[nodes.Expr], names: frozenset[str]) -> bool:
    return all(isinstance(value, nodes.Const) and value.value in names for value in values)


def _has_spread(node: nodes.Call | nodes.Filter | nodes.Test) -> bool:
    return node.dyn_args is not None or node.dyn_kwargs is not None


def _is_constant(node: nodes.Node) -> bool:
    if isinstance(node, nodes.List | nodes.Tuple | nodes.Dict | nodes.Pair | nodes.Neg):
        return all(map(_is_constant, node.iter_child_nodes()))
    return isinstance(node, nodes.Const)


def _is_small(node: nodes.Node) -> bool:
    """Whether a value is a constant without long texts and large numbers."""
    if not isinstance(node, nodes.Const):
        return _is_constant(node) and all(map(_is_small, node.iter_child_nodes()))
    size = len(node.value) if isinstance(node.value, str) else node.value or 0
    return bool(abs(size) <= _MAX_ARGUMENT)


def _is_used_at_once(node: nodes.Node, parent: nodes.Node | None) -> bool:
    """Whether a container is used up by its parent expression, so that no other can hold it."""
    match parent:
        case nodes.List() | nodes.Dict() | nodes.Pair():
            # The outer container was checked already. (A tuple is excluded: it may be unpacked.)
            return True
        case nodes.Operand():
            return parent.op in ("in", "notin")
        case nodes.Filter():
            return parent.name == "tojson" and parent.node is node
        case nodes.Mod():
            return parent.right is node
        case nodes.Assign(target=nodes.Tuple()) if isinstance(node, nodes.Tuple):
            return True
    return isinstance(node, nodes.Tuple) and node.ctx != "load"


def _is_time_format(node: nodes.Call) -> bool:
    match node.args:
        case [nodes.Const(value=str() as text)]:
            # A number in the format could be a width, so digits are not allowed.
            return not node.kwargs and _is_small(node.args[0]) and not re.search(r"\d", text)
    return False
