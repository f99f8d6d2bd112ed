"""Splits an expression of a program into steps, which are executed one by one."""

from __future__ import annotations

from headrace.lang import ir

Step = tuple[ir.SglExpr, str | None]
"""A part to execute, and the reasoning parser if the generation's reasoning is split off."""


def steps_of(expression: ir.SglExpr) -> list[Step]:
    """Return the single expressions of `expression` in order, each with a reasoning parser's name.

    The name is None, except for a generation inside of `separate_reasoning`.
    """
    parts = list(expression.parts())
    marks = [part for part in parts if isinstance(part, ir.SglSeparateReasoning)]
    if not marks:
        return [(part, None) for part in parts]
    reasoning = {mark.name: mark.model_type for mark in marks}
    steps: list[Step] = []
    for part in parts:
        if isinstance(part, ir.SglSeparateReasoning):
            continue
        name = part.name if isinstance(part, (ir.SglGen, ir.SglSelect)) else None
        steps.append((part, reasoning.get(name) if name else None))
    return steps
