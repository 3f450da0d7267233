"""What a forward asks of how many rows values count, `if rows.numel() == 0:`, for torch.export: answered as for some rows, with a
check in the captured graph. Where a graph and its model agree on inputs that answer otherwise, too, the check goes: most such
lines only save work.
"""

from __future__ import annotations

import functools
import operator
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import fx, nn

from .asked import ASKED, CHECKS, LIBRARY, Answers, compare
from .guard import has_storage, patched
from .numbers import Answer

SOME = 720720  # rows that are counted, in an answer: a number of which most are divisors, so that rows are grouped as they wish
RELATIONS: dict[str, Callable] = {f"__{n}__": getattr(operator, n) for n in ("eq", "ne", "lt", "le", "gt", "ge")}
aten = torch.ops.aten
SUMS = (aten.any.default, aten.sum.default, aten.count_nonzero.default)
COPIES = (aten.to.dtype, aten._to_copy.default, aten.clone.default)
MOVED = (aten.detach.default, aten.alias.default, *COPIES)
COMPARED = {getattr(aten, n.strip("_")).Scalar: f for n, f in RELATIONS.items()}


LIBRARY.define("supposed(Tensor x, float[] expected, str text) -> ()")
LIBRARY.impl("supposed", compare, "CompositeExplicitAutograd")
LIBRARY.impl("supposed", lambda x, expected, text: None, "Meta")
SUPPOSED = torch.ops.torch2needle.supposed.default
fx.node.has_side_effect(SUPPOSED)
CHECKS.add(SUPPOSED)


def some_rows() -> AbstractContextManager:
    """Comparisons of numbers of counted rows in a forward are answered as where there are some."""
    from torch.fx.experimental import symbolic_shapes  # which loads sympy

    has_free_unbacked_symbols, before_all = (
        symbolic_shapes.has_free_unbacked_symbols,
        symbolic_shapes.ShapeEnv.evaluate_expr,
    )
    thread = threading.get_ident()

    def counted(value: Any) -> bool:
        return isinstance(value, torch.SymInt) and has_free_unbacked_symbols(value)

    def compared(before: Callable, relation: Callable, self: Any, *other: Any) -> Any:
        frame = sys._getframe(2)
        to = other[0] if other else 0
        mine = threading.get_ident() == thread and not frame.f_globals.get("__name__", "").startswith("torch")
        if not mine or not isinstance(to, int | torch.SymInt) or not (counted(self) or counted(to)):
            return before(self, *other)
        return answer(self - to, relation, frame)

    def method(name: str) -> tuple[Any, str, Callable]:
        before, how = getattr(torch.SymInt, name), RELATIONS.get(name, operator.ne)

        @functools.wraps(before)
        def ask(self: Any, *other: Any) -> Any:
            return compared(before, how, self, *other)

        return torch.SymInt, name, ask

    @functools.wraps(before_all)
    def evaluate(self: Any, formula: Any, *args: Any, **kwargs: Any) -> Any:
        """torch's own questions, whose answers for no row and for one lead to the same."""
        try:
            return before_all(self, formula, *args, **kwargs)
        except symbolic_shapes.GuardOnDataDependentSymNode:
            truth = not formula.is_number and (formula.is_Relational or formula.is_Boolean)
            rows = all(s.is_integer for s in formula.free_symbols)  # and no number of a tensor
            if threading.get_ident() != thread or not truth or not rows:
                raise
            return with_rows(formula, self, SOME)

    own = (symbolic_shapes.ShapeEnv, "evaluate_expr", evaluate)
    return patched([own, *(method(name) for name in (*RELATIONS, "__bool__"))])


def with_rows(formula: Any, env: Any, rows: int) -> Any:
    """The value of a formula of sizes where so many rows are counted, of others as in the example."""
    return formula.subs({s: env.backed_var_to_val.get(s, rows) for s in formula.free_symbols})


def asks_for_none(value: Callable[[int], Any]) -> bool:
    """Whether a question, as a function of how many rows are counted, is whether there are any."""
    return value(0) != value(1) == value(2) == value(SOME)


def answer(number: Any, relation: Callable, frame: Any) -> bool:
    """How a number compares with 0 where some rows are counted, which the graph checks."""

    def value(rows: int) -> bool:
        return bool(relation(int(with_rows(number.node.expr, number.node.shape_env, rows)), 0))

    told = value(SOME)
    text = Answer.at("__bool__", frame, told).text
    check = SUPPOSED if asks_for_none(value) else ASKED
    check(relation(torch.scalar_tensor(number, dtype=torch.int64), 0), [float(told)], text)
    return told


def supposed(graph: fx.Graph) -> dict[fx.Node, str]:
    """The checks of a graph that may go, with their lines: that there are rows, or that any element of a mask is true."""
    found = {n: str(n.args[2]) for n in graph.nodes if n.target is SUPPOSED}
    return found | {n: str(n.args[2]) for n, none in of_masks(graph) if [float(none)] != n.args[1]}


def for_some(answers: Answers, graph: fx.Graph) -> Answers | None:
    """The answers as for masks in which something is true, where those that the graph holds are others."""
    some = {n.args[2]: not none for n, none in of_masks(graph) if [float(none)] == n.args[1]}
    told = (a._replace(value=some.get(a.text, a.value)) if isinstance(a.value, bool) else a for a in answers)
    return Answers(told, answers.scopes) if some else None


def of_masks(graph: fx.Graph) -> Iterator[tuple[fx.Node, bool | int]]:
    """The checks of whether anything in a mask is true, with what is found where nothing is."""
    for n in graph.nodes:
        if n.target is ASKED and n.args[0].meta["val"].dtype == torch.bool:
            value = functools.partial(of_mask, n.args[0])
            none = value(0)
            if none is not None and asks_for_none(value):
                yield n, none


def of_mask(node: Any, true: int) -> bool | int | None:
    """The value of what is asked of a mask where so many of it are true; None for what is asked of others."""
    if not isinstance(node, fx.Node) or not node.args:
        return None
    if node.target in SUMS:
        mask: Any = node.args[0]
        while mask.target in MOVED:
            mask = mask.args[0]
        found = true > 0 if node.target is aten.any.default else true
        return found if mask.meta["val"].dtype == torch.bool else None
    value = of_mask(node.args[0], true)
    if value is None or node.target in MOVED:
        return value
    if node.target is aten.logical_not.default:
        return not value
    relation = COMPARED.get(node.target)
    return relation(value, node.args[1]) if relation and isinstance(node.args[1], int | float) else None


def drop(graph: fx.Graph, lines: set[str]) -> None:
    """Without the checks of these lines."""
    for node, text in supposed(graph).items():
        if text in lines:
            graph.erase_node(node)


@contextmanager
def trained(model: nn.Module) -> Iterator[None]:
    """Inside, parameters and buffers have other values: those that start as zeros hide what depends on them."""
    chance = torch.Generator().manual_seed(0)
    tensors = [t for t in (*model.parameters(), *model.buffers()) if t.is_floating_point() and has_storage(t)]
    before = [t.data for t in tensors]
    try:
        for t in tensors:
            noise = torch.randn(t.shape, generator=chance).to(t) * 0.1
            t.data = t.data + (noise if isinstance(t, nn.Parameter) else noise.abs())
        yield
    finally:
        for t, value in zip(tensors, before, strict=True):
            t.data = value
