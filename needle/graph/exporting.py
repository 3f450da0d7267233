"""What exporters of graphs need: calls traced with the ops that they have rows for, a free batch by comparing traces."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Container, Sequence
from typing import Any, NamedTuple

import numpy as np

from needle.autograd import Op, Spec, Tensor, Unsupported
from needle.complex_numbers import Complex
from needle.nn.module import Module

from .graph import Graph, Node
from .module import GraphModule
from .record import Recorder, trace
from .structure import map_structure

BATCHES = (2, 3, 5)  # at which a model of free batch is traced: two give the sizes, the third checks them
FAR = (1, 64)  # ... and at which it has to take inputs: what it asks of sizes no exported graph asks


class ExportRecorder(Recorder):
    """Records the ops that are exported; the others become what they consist of."""

    def exported(self, op: Op) -> bool:
        raise NotImplementedError

    def whole(self, op: Op) -> bool:
        """Whether an exported op stays one also where a plan decomposes it."""
        raise NotImplementedError

    def record(self, op: Op, inputs: Sequence[Tensor]) -> Any:
        symbols = [t if t.recorder is self else self.param(t) for t in inputs]
        if not self.exported(op):
            return map_structure(op.decompose(*symbols), lambda t: t if t.recorder is self else self.param(t))
        if self.whole(op) and not self.trains:  # gradients know parts alone
            node = self.graph.add("op", op, tuple(s.node for s in symbols), op.label)  # type: ignore[attr-defined]
            return self._symbol(node, op.infer(*(s.spec for s in symbols)))  # type: ignore[attr-defined]
        return super().record(op, symbols)


def has_row(cls: type[Op], rows: Container[type]) -> bool:
    """Whether the op itself is exported, not its decomposition: it has a row at least as near as its `decompose`."""
    if cls.decompose is Op.decompose:
        return True
    return next(c in rows for c in cls.__mro__ if c in rows or "decompose" in vars(c))


def traced(fn: Callable, examples: Sequence[Any], recorder: ExportRecorder) -> Graph:
    """A call with parameters under their names."""
    if isinstance(fn, Module):
        recorder.param_paths = {id(t): name for name, t in reversed(list(fn.named_tensors()))}
    return trace(fn, *examples, names=input_names(fn, examples), recorder=recorder)


def shaped(
    graph_of: Callable[[Sequence[Any]], Graph], examples: Sequence[Any], batch: Any, numbered: Container[type] = ()
) -> tuple[Graph, dict[Node, Any]]:
    """A call's graph and the shapes of its values; batch: what stands for a free axis 0 of all inputs, None for the examples'.

    numbered: ops of which a number may follow the batch, too, as an expression of it."""
    if batch is None:
        graph = graph_of(examples)
        return graph, exact_shapes(graph)
    for b in FAR:
        try:
            graph_of(with_batch(examples, b))
        except ValueError as e:
            raise Unsupported(f"[export] the model takes no batch of {b} ({e}); export it for one.") from e
    graphs = [graph_of(with_batch(examples, b)) for b in BATCHES]
    free_numbers(graphs, batch, numbered)
    for nodes in zip(*graphs, strict=False):
        if all(n.kind == "param" for n in nodes) and len({n.meta["spec"] for n in nodes}) > 1:
            nodes[0].meta["ramp"] = ramp_of([n.meta["tensor"].numpy() for n in nodes])
    return graphs[0], free_shapes(graphs, batch)


def free_numbers(graphs: Sequence[Graph], batch: Any, numbered: Container[type]) -> None:
    """Put expressions of `batch` in place of whole numbers by which ops of the traces differ."""
    for nodes in zip(*graphs, strict=False):
        ops = [n.target for n in nodes]
        if len({type(o) for o in ops}) > 1 or type(ops[0]) not in numbered or same_attributes(nodes):
            continue
        changed = {}
        for name, *values in zip(ops[0].attributes(), *(o.attributes().values() for o in ops), strict=True):
            if any(v != values[0] for v in values) and (free := free_number(values, batch)) is not None:
                changed[name] = free
        for n in nodes:
            n.target = copy.copy(n.target)
            vars(n.target).update(changed)


def with_batch(examples: Sequence[Any], batch: int) -> list[Any]:
    return map_structure(examples, lambda s: Spec((batch, *s.shape[1:]), s.dtype) if isinstance(s, Spec) else s)


def exact_shapes(graph: Graph) -> dict[Node, Any]:
    specs = {n: n.meta["spec"] for n in graph if n.meta.get("spec") is not None}
    return {n: s.shape if isinstance(s, Spec) else tuple(i.shape for i in s) for n, s in specs.items()}


def free_number(values: Sequence[Any], batch: Any) -> Any:
    """A whole number, or some in nested tuples, as expressions of `batch`; None where something else differs."""
    first = values[0]
    if all(type(v) is type(first) and v == first for v in values):
        return first
    if all(type(v) is int for v in values):
        return free_size(values, batch)
    if not all(type(v) is tuple and len(v) == len(first) for v in values):
        return None
    parts = [free_number(p, batch) if any(v != p[0] for v in p) else p[0] for p in zip(*values, strict=True)]
    return None if any(new is None and old is not None for new, old in zip(parts, first, strict=True)) else tuple(parts)


class Ramp(NamedTuple):
    """A constant that grows with the batch: `start` at place 0 of `axis`, `step` more at each further one."""

    axis: int
    start: np.ndarray
    step: np.ndarray


def ramp_of(arrays: Sequence[np.ndarray]) -> Ramp | None:
    """What a constant's values at several batches are parts of, as those of `arange` are."""
    last = arrays[-1]
    axes = [i for i, sizes in enumerate(zip(*(a.shape for a in arrays), strict=True)) if len(set(sizes)) > 1]
    if len(axes) != 1 or last.shape[axes[0]] < 2 or last.dtype == bool:
        return None
    axis = axes[0]
    start, second = np.split(last, [1, 2], axis)[:2]
    ramp = Ramp(axis, start, second - start)
    places = [np.arange(a.shape[axis]).reshape([-1 if i == axis else 1 for i in range(a.ndim)]) for a in arrays]
    same = all(np.array_equal(a, ramp.start + ramp.step * p) for a, p in zip(arrays, places, strict=True))
    return ramp if same else None


def free_size(sizes: Sequence[int], batch: Any) -> Any:
    """The size that is sizes[i] at batch BATCHES[i], as an expression of `batch`."""
    first, second, third = sizes
    slope, rest = divmod(second - first, BATCHES[1] - BATCHES[0])
    offset = first - slope * BATCHES[0]
    if rest or offset + slope * BATCHES[2] != third:
        raise Unsupported(f"[export] a size is no multiple of the batch: {sizes} at batches {BATCHES}.")
    return batch * slope + offset if slope else first


def free_shapes(graphs: Sequence[Graph], batch: Any) -> dict[Node, Any]:
    """The shapes of the first graph's nodes with the batch free, found by comparing traces at BATCHES."""
    if len({len(g.nodes) for g in graphs}) > 1:
        raise Unsupported("[export] the model does other things at another batch size; export it for one.")
    for nodes in zip(*graphs, strict=True):
        node = nodes[0]
        if len({(n.kind, type(n.target), n.name) for n in nodes}) > 1 or not same_attributes(nodes):
            raise Unsupported(f"[export] {node.name} differs between batch sizes; export the model for one.")
    exact = [exact_shapes(g) for g in graphs]
    return {n: joined(s, batch) for n, *s in zip(exact[0], *(e.values() for e in exact), strict=True)}


def joined(sizes: Sequence[Any], batch: Any) -> Any:
    """A size, or sizes in nested tuples, as expressions of `batch`, from those at BATCHES."""
    if isinstance(sizes[0], int):
        return free_size(sizes, batch)
    return tuple(joined(s, batch) for s in zip(*sizes, strict=True))


def same_attributes(nodes: Sequence[Node]) -> bool:
    """Whether the ops of several traces are one op; a result's shape may differ, for exporters take it from the result."""
    if nodes[0].kind != "op":
        return True
    attributes = [{k: v for k, v in n.target.attributes().items() if k != "shape"} for n in nodes]
    return all(str(a) == str(attributes[0]) for a in attributes)


def as_example(x: Any) -> Any:
    """Shape and dtype of a tensor of any library; everything else as it is."""
    from needle.interop import as_tensor

    if isinstance(x, Spec):
        return x
    x = as_tensor(x)
    if isinstance(x, Complex):
        return x.map(as_example)
    return Spec(tuple(x.shape), str(x.dtype)) if isinstance(x, Tensor) else x


def input_names(model: Callable, examples: Sequence[Any]) -> list[str]:
    """Names of the inputs: torch's of a converted net, else those of the parameters of the call, nested ones numbered."""
    if isinstance(model, GraphModule) and (told := converted_names(model, examples)):
        return told
    try:
        known = list(inspect.signature(getattr(model, "forward", model)).parameters)
    except (TypeError, ValueError):
        known = []
    names: list[str] = []
    for i, e in enumerate(examples):
        stem = known[i] if i < len(known) and known[i] not in ("args", "kwargs") else f"x{i}"
        leaves: list[Any] = []
        map_structure(e, lambda s: leaves.append(s) if isinstance(s, Spec) else None)  # noqa: B023
        names += [stem] if isinstance(e, Spec) else [f"{stem}_{k}" for k in range(len(leaves))]
    return names


def converted_names(model: GraphModule, examples: Sequence[Any]) -> list[str]:
    """torch's names of the examples' leaves, [] where it is not known which is which."""
    leaves: list[Any] = []
    map_structure(list(examples), lambda s: leaves.append(s) if isinstance(s, Spec) else None)
    places = ["_".join(map(str, n.meta.get("place", (n.target,)))) for n in model.graph.inputs]
    found = {id(v): place for v, place in zip(model.bind(tuple(examples), {}), places, strict=True)}
    names = [found.get(id(leaf), "") for leaf in leaves]
    return names if all(names) and len(set(names)) == len(names) else []
