"""Infers the types of expressions in a chat template: text, number, or unknown."""

from __future__ import annotations

import enum

from jinja2 import nodes

TEXT_FILTERS = frozenset(
    ("trim", "upper", "lower", "capitalize", "title", "string", "tojson", "join", "replace")
)
NUMBER_FILTERS = frozenset(("length", "count", "int", "float", "abs", "round"))
TEXT_METHODS = frozenset(
    ("strip", "lstrip", "rstrip", "upper", "lower", "capitalize", "title", "replace", "join")
)
_LOOP_NUMBERS = frozenset(("index", "index0", "revindex", "revindex0", "length", "depth", "depth0"))
_SPECIAL_TOKENS = frozenset(("bos_token", "eos_token", "unk_token", "pad_token"))
_MAX_LEVELS = 50


class Kind(enum.Enum):
    """The type of an expression. `NEVER` means that no value has been assigned yet."""

    NEVER = 0
    TEXT = 1
    NUMBER = 2
    UNKNOWN = 3


class Kinds:
    """Returns the kind of any expression of one template.

    Attributes:
        stored: names to which the template assigns values.
        macros: names of the template's macros.
    """

    def __init__(self, tree: nodes.Template) -> None:
        """Find the kinds that the assignments of `tree` give to variables."""
        stores = [name.name for name in tree.find_all(nodes.Name) if name.ctx != "load"]
        self.stored = frozenset(stores)
        self.macros = frozenset(macro.name for macro in tree.find_all(nodes.Macro))
        assigns = list(tree.find_all(nodes.Assign))
        made = [
            assign.target.name
            for assign in assigns
            if isinstance(assign.target, nodes.Name) and _makes_namespace(assign.node)
        ]
        self._namespaces = {name for name in made if made.count(name) == stores.count(name)}
        # For each attribute name, the kind of all values assigned to it in any namespace.
        self._attributes: dict[str, Kind] = {}
        self._learn_attributes(tree, assigns)

    def _learn_attributes(self, tree: nodes.Template, assigns: list[nodes.Assign]) -> None:
        given: list[tuple[str, nodes.Node]] = []
        plain = set()
        for assign in assigns:
            if isinstance(assign.target, nodes.NSRef):
                given.append((assign.target.attr, assign.node))
                plain.add(assign.target)
            elif isinstance(assign.node, nodes.Call) and _makes_namespace(assign.node):
                given += [(each.key, each.value) for each in assign.node.kwargs]
        for name, _ in given:
            self._attributes[name] = Kind.NEVER
        for reference in tree.find_all(nodes.NSRef):
            if reference not in plain:
                self._attributes[reference.attr] = Kind.UNKNOWN
        has_changed = True
        while has_changed:
            has_changed = False
            for name, value in given:
                before = self._attributes[name]
                self._attributes[name] = _either(before, self.of(value))
                has_changed = has_changed or self._attributes[name] is not before

    def of(self, node: nodes.Node | None, level: int = 0) -> Kind:  # noqa: C901  # a table
        """Return the kind of `node`, if its evaluation succeeds; `level` is the recursion depth."""
        if level > _MAX_LEVELS:
            return Kind.UNKNOWN
        match node:
            case nodes.Const(value=str()) | nodes.Concat() | nodes.TemplateData():
                return Kind.TEXT
            case nodes.Const(value=int() | float()):
                return Kind.NUMBER
            case nodes.Compare() | nodes.Not() | nodes.Test() | nodes.Neg() | nodes.Pos():
                return Kind.NUMBER
            case nodes.Sub() | nodes.Div() | nodes.FloorDiv():
                return Kind.NUMBER
            case nodes.Filter(name=name):
                if name in TEXT_FILTERS:
                    return Kind.TEXT
                return Kind.NUMBER if name in NUMBER_FILTERS else Kind.UNKNOWN
            case nodes.Name(name=name) if name in _SPECIAL_TOKENS - self.stored:
                return Kind.TEXT
            case nodes.Call(node=nodes.Getattr(attr=attr)) if attr in TEXT_METHODS:
                return Kind.TEXT
            case nodes.Call(node=nodes.Name(name=name)) if name in self.macros:
                return Kind.TEXT
            case nodes.Getattr(node=nodes.Name(name=name), attr=attr):
                if name in self._namespaces:
                    return self._attributes.get(attr, Kind.UNKNOWN)
                is_loop = name == "loop" and name not in self.stored
                return Kind.NUMBER if is_loop and attr in _LOOP_NUMBERS else Kind.UNKNOWN
            case nodes.CondExpr():
                return _either(self.of(node.expr1, level + 1), self.of(node.expr2, level + 1))
            case nodes.And() | nodes.Or():
                return _either(self.of(node.left, level + 1), self.of(node.right, level + 1))
            case nodes.Add():
                kinds = {self.of(node.left, level + 1), self.of(node.right, level + 1)}
                # If the sum succeeds, both operands have the same kind, so one known kind suffices.
                return min(kinds, key=lambda kind: kind.value)
        return Kind.UNKNOWN


def _either(one: Kind, other: Kind) -> Kind:
    if Kind.NEVER in (one, other) or one is other:
        return other if one is Kind.NEVER else one
    return Kind.UNKNOWN


def _makes_namespace(node: nodes.Node) -> bool:
    match node:
        case nodes.Call(node=nodes.Name(name="namespace"), args=[], dyn_args=None, dyn_kwargs=None):
            return True
    return False
