"""An executor of graphs made by hand: shapes from what is fed, memory planned once per set of shapes, one kernel per (op, shape).

`variables` gives symbols of needle's own graph without shapes; needle's functions and operators on them record, `gradients`
stands for needle's own tape. `Executor` replays the record at the shapes of a feed.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tvm

from needle import ops
from needle.autograd import Op, Spec, Tensor, Unsupported, vjp
from needle.backend_ndarray import NDArray
from needle.executor.memory import Lifetime, plan_offsets
from needle.graph import Dim, Node, Recorder, Symbol
from needle.graph.graph import SCALAR_OPERATORS
from needle.ops.linalg.basic import MatMul
from needle.ops.math.activation import ActivationGrad, ReLU
from needle.ops.math.elementwise import AddScalar, DivScalar, EWiseAdd, EWiseMul, MulScalar, Negate
from needle.ops.nn.conv import Conv2d
from needle.ops.reduce.basic import Summation
from needle.ops.reduce.softmax import Softmax
from needle.ops.shape.basic import BroadcastTo, Reshape, Transpose

from . import kernels

ITEM = 4  # bytes of float32, the one dtype here

# -- the user's graph ----------------------------------------------------------------------------------------------------


def variables(*names: str) -> list[Symbol]:
    """Symbols that are fed when the graph runs; only those of one call meet in one graph."""
    recorder = Recorder(static=False)
    return [recorder.input(n, None) for n in names]


@dataclasses.dataclass(frozen=True, eq=False)
class Gradient(Op):
    """d loss / d value; inputs (loss, value). Never runs: the replay puts the ops of the gradient in its place."""


@dataclasses.dataclass(frozen=True, eq=False)
class SoftmaxCrossEntropy(Op):
    """Mean over the rows of -sum(labels * log softmax(logits)); logits and labels (N, C), result (1,)."""

    def infer(self, logits: Any, labels: Any) -> Spec:
        if len(logits.shape) != 2 or tuple(labels.shape) != tuple(logits.shape):
            raise ValueError(
                f"[softmax_cross_entropy] expects logits and labels of one shape (N, C), got {tuple(logits.shape)} and "
                f"{tuple(labels.shape)}."
            )
        return Spec((1,), logits.dtype)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        logits, labels = node.inputs
        slope = (ops.softmax(logits, 1) + labels * -1.0) * (1.0 / logits.shape[0])
        return slope * ops.broadcast_to(ops.reshape(out_grad, (1, 1)), logits.shape), None


@dataclasses.dataclass(frozen=True, eq=False)
class SgdUpdate(Op):
    """value - learning_rate * gradient."""

    learning_rate: float

    def infer(self, value: Any, gradient: Any) -> Spec:
        if tuple(value.shape) != tuple(gradient.shape):
            raise ValueError(f"[sgd_update] gradient expects shape {tuple(value.shape)}, got {tuple(gradient.shape)}.")
        return Spec(tuple(value.shape), value.dtype)


def gradients(loss: Symbol, values: Sequence[Symbol]) -> list[Symbol]:
    """d loss / d value for every value, as symbols; loss (1,) or ()."""
    return [Gradient()(loss, v) for v in values]


def softmax_cross_entropy(logits: Symbol, labels: Symbol) -> Symbol:
    """Mean cross entropy of logits (N, C) and labels as rows (N, C): (1,)."""
    return SoftmaxCrossEntropy()(logits, labels)


def sgd_update(value: Symbol, gradient: Symbol, learning_rate: float) -> Symbol:
    """value - learning_rate * gradient."""
    return SgdUpdate(learning_rate)(value, gradient)


# -- its replay at known shapes ------------------------------------------------------------------------------------------


class Tape(Recorder):
    """Records at fixed shapes. Its symbols remember what made them, as tensors do, so that gradients are recorded, too."""

    def __init__(self) -> None:
        super().__init__(static=True)

    def input(self, name: str, spec: Spec | None) -> Symbol:
        symbol = super().input(name, spec)
        symbol.requires_grad = True
        return symbol

    def record(self, op: Op, inputs: Sequence[Tensor]) -> Any:
        if op.must_decompose(*inputs) or not (op.has_own_gradient or type(op).decompose is Op.decompose):
            return op.decompose(*inputs)
        if isinstance(op, EWiseAdd | EWiseMul):  # broadcasting is an op of its own here
            shape = np.broadcast_shapes(*(tuple(t.shape) for t in inputs))
            inputs = [t if tuple(t.shape) == shape else ops.broadcast_to(t, shape) for t in inputs]
        symbols = tuple(t if t.recorder is self else self.param(t) for t in inputs)
        out = super().record(op, symbols)
        if op.n_out > 1:
            raise Unsupported(f"[executor] {op.label} has several results, which this executor does not know.")
        out.op, out.inputs = op, symbols
        out.requires_grad = op.has_own_gradient and any(s.requires_grad for s in symbols)
        return out


class Step(NamedTuple):
    """One call of a kernel."""

    kernel: Callable[..., None]
    inputs: list[Node]
    out: Node


# The maker of an op's kernel and its arguments, from (op, spec of the result, *specs of the inputs); None where there is none.
MAKERS: dict[type[Op], Callable[..., tuple | None]] = {
    EWiseAdd: lambda op, out, *_: (kernels.make_elemwise_add, out.shape),
    EWiseMul: lambda op, out, *_: (kernels.make_elemwise_mul, out.shape),
    AddScalar: lambda op, out, *_: (kernels.make_elemwise_add_by_const, out.shape, op.scalar),
    MulScalar: lambda op, out, *_: (kernels.make_elemwise_mul_by_const, out.shape, op.scalar),
    DivScalar: lambda op, out, *_: (kernels.make_elemwise_mul_by_const, out.shape, 1.0 / op.scalar),
    Negate: lambda op, out, *_: (kernels.make_elemwise_mul_by_const, out.shape, -1.0),
    ReLU: lambda op, out, *_: (kernels.make_relu, out.shape),
    ActivationGrad: lambda op, out, *_: (kernels.make_relu_gradient, out.shape) if op.activation == "relu" else None,
    BroadcastTo: lambda op, out, x: (kernels.make_broadcast_to, x.shape, out.shape),
    Summation: lambda op, out, x: (kernels.make_reduce_sum_axis_zero, x.shape) if op._arguments(x)[0] == (0,) else None,
    Softmax: lambda op, out, x: (
        (kernels.make_matrix_softmax, x.shape) if len(x.shape) == 2 and op.axis in (1, -1) else None
    ),
    Conv2d: lambda op, out, x, w, *bias: (
        (kernels.make_conv2d, x.shape, w.shape) if op.attributes() == Conv2d().attributes() and not bias else None
    ),
    SoftmaxCrossEntropy: lambda op, out, x, y: (kernels.make_matrix_softmax_cross_entropy, x.shape),
    SgdUpdate: lambda op, out, *_: (kernels.make_sgd_update, out.shape, op.learning_rate),
}


@functools.lru_cache(maxsize=1024)
def compiled(make: Callable[..., Any], args: tuple, target: Any, options: tuple) -> Callable[..., None]:
    """One kernel per (op, shape), kept for every executor of the process."""
    return make(*args, target, "llvm", make.__name__.removeprefix("make_"), **dict(options))


class Executor:
    """Runs `eval_node_list`, symbols of one `variables` call, on a tvm device (`ctx`, default the CPU).

    scheduled=False gives matrix products TVM's default loops.
    """

    def __init__(self, eval_node_list: Sequence[Symbol], ctx: Any = None, *, scheduled: bool = True) -> None:
        self.eval_node_list = list(eval_node_list)
        if len({id(s.recorder) for s in self.eval_node_list}) != 1:
            raise ValueError(
                f"[executor] expects nodes made from the variables of one call, got {len(self.eval_node_list)} nodes of "
                f"{len({id(s.recorder) for s in self.eval_node_list})} calls."
            )
        self.ctx = tvm.cpu(0) if ctx is None else ctx
        self.target = "llvm" if self.ctx.dlpack_device_type() == tvm.cpu(0).dlpack_device_type() else "cuda"
        self.scheduled = scheduled
        self.feed_shapes: dict[Symbol, tuple[int, ...]] | None = None
        self.node_to_shape_map: dict[Symbol, tuple[int, ...]] = {}  # of what is fed and what is evaluated
        self.node_to_arr_map: dict[Node, Any] = {}  # arrays in the arena
        self.steps: list[Step] = []
        self.arena_bytes = 0

    # -- shapes ----------------------------------------------------------------------------------------------------------

    def infer_shape(self, feed_shapes: Mapping[Symbol, Sequence[int]]) -> dict[Symbol, tuple[int, ...]]:
        """Replay the graph at these shapes; the shapes of what is fed and evaluated."""
        needed = self._needed()
        tape = Tape()
        made: dict[Node, Any] = {}  # nodes of the user's graph -> their symbols, tensors and sizes here
        fed = {s.node: (s, tuple(shape)) for s, shape in feed_shapes.items()}
        for node in needed:
            if node.kind == "input":
                if node not in fed:
                    raise ValueError(f"[executor] variable {node.target} is not fed.")
                made[node] = tape.input(node.target, Spec(fed[node][1]))
            elif node.kind == "param":
                made[node] = node.meta["tensor"]
            elif node.kind == "scalar":
                a, b = (
                    made[x] if isinstance(x, Node) else made[x.node] if isinstance(x, Dim) else x for x in node.args
                )
                made[node] = a.shape[b] if node.target == "size" else SCALAR_OPERATORS[node.target](a, b)
            elif isinstance(node.target, Gradient):
                if node not in made:
                    made |= self._gradients(node, needed, made)
            else:
                made[node] = self._replayed(node, made)
        self.inputs = {s: made[n].node for n, (s, _) in fed.items() if n in made}
        self.outputs = [self._symbol(tape, made[s.node]).node for s in self.eval_node_list]
        self.graph = tape.graph
        self.node_to_shape_map = {s: tuple(made[s.node].shape) for s in (*self.inputs, *self.eval_node_list)}
        self.feed_shapes = {s: tuple(shape) for s, shape in feed_shapes.items()}
        return self.node_to_shape_map

    def _needed(self) -> list[Node]:
        """What the evaluated nodes read, in the graph's order."""
        graph = self.eval_node_list[0].recorder.graph
        needed = {s.node for s in self.eval_node_list}
        for node in reversed(graph.nodes):
            if node in needed:
                needed.update(node.inputs())
        return [n for n in graph if n in needed]

    @staticmethod
    def _symbol(tape: Tape, value: Any) -> Symbol:
        return value if isinstance(value, Symbol) else tape.param(value)

    @staticmethod
    def _replayed(node: Node, made: Mapping[Node, Any]) -> Any:
        return node.target.resolve(lambda d: made[d.node])(*(made[a] for a in node.args))

    @staticmethod
    def _gradients(node: Node, needed: Sequence[Node], made: Mapping[Node, Any]) -> dict[Node, Any]:
        """A gradient; with all others of the same loss in one walk where they are of variables."""
        loss, value = node.args
        if made[loss].size != 1:
            raise ValueError(f"[gradients] the loss expects one value, got shape {tuple(made[loss].shape)}.")
        same = [n for n in needed if isinstance(n.target, Gradient) and n.args[0] is loss and n.args[1].kind == "input"]
        nodes = same if value.kind == "input" else [node]
        ones = Tensor(np.ones(made[loss].shape, "float32"), requires_grad=False)
        found = vjp(made[loss], ones, [made[n.args[1]] for n in nodes])
        for n, gradient in zip(nodes, found, strict=True):
            if gradient is None:
                raise ValueError(f"[gradients] the loss does not depend on {n.args[1].name}.")
        return dict(zip(nodes, found, strict=True))

    # -- steps and memory ------------------------------------------------------------------------------------------------

    def memory_plan(self, feed_shapes: Mapping[Symbol, Sequence[int]]) -> dict[Node, Any]:
        """Kernels for every op and one arena for what they pass on; the arrays of the arena by node."""
        if self.feed_shapes != {s: tuple(shape) for s, shape in feed_shapes.items()}:
            self.infer_shape(feed_shapes)
        self.alias: dict[Node, Node] = {}  # reshaped nodes -> the node that has their memory
        self.constants = {
            n: tvm.runtime.tensor(n.meta["tensor"].numpy(), self.ctx) for n in self.graph if n.kind == "param"
        }
        self.steps = self._steps()
        last: dict[Node, int] = {}
        for i, step in enumerate(self.steps):
            for n in (*step.inputs, step.out):
                last[self._base(n)] = i
        kept = {self._base(n) for n in self.outputs}
        first = {s.out: i for i, s in enumerate(self.steps) if s.out not in kept}
        lifetimes = [Lifetime(math.prod(n.meta["spec"].shape) * ITEM, i, last[n]) for n, i in first.items()]
        offsets, self.arena_bytes = plan_offsets(lifetimes)
        self.node_to_arr_map = self._arrays(dict(zip(first, offsets, strict=True)))
        return self.node_to_arr_map

    def _arrays(self, offsets: dict[Node, int]) -> dict[Node, Any]:
        """Arrays at these bytes of one arena; on a GPU, where TVM's kernels take no offsets, each on its own."""
        if self.target != "llvm":
            return {n: self._empty(n) for n in offsets}
        arena = NDArray.empty((self.arena_bytes // ITEM,))
        found = {}
        for n, offset in offsets.items():
            shape = n.meta["spec"].shape
            part = arena[offset // ITEM : offset // ITEM + math.prod(shape)].reshape(shape)
            found[n] = tvm.runtime.from_dlpack(part)
        return found

    def _empty(self, node: Node) -> Any:
        return tvm.runtime.empty(node.meta["spec"].shape, "float32", self.ctx)

    def _base(self, node: Node) -> Node:
        while node in self.alias:
            node = self.alias[node]
        return node

    def _steps(self) -> list[Step]:
        needed = set(self.outputs)
        steps: list[Step] = []
        for node in reversed(self.graph.nodes):
            if node not in needed or node.kind != "op":
                continue
            if isinstance(node.target, Reshape):
                self.alias[node] = node.args[0]
                needed.add(node.args[0])
                continue
            make, args, inputs = self._maker(node)
            needed.update(inputs)
            options = (("scheduled", self.scheduled),) if make is kernels.make_matrix_mul else ()
            steps.append(Step(compiled(make, args, self.target, options), inputs, node))
        return steps[::-1]

    def _maker(self, node: Node) -> tuple[Callable[..., Any], tuple, list[Node]]:
        """The maker of a node's kernel, its arguments, and the nodes that the kernel reads."""
        op, specs = node.target, [a.meta["spec"] for a in node.args]
        if isinstance(op, MatMul | Transpose) and node.meta["spec"].ndim == 2:
            if isinstance(op, Transpose):  # not beside a product: a product with the identity
                raise self._unsupported(op)
            (a, left), (b, right) = (self._matrix(x) for x in node.args)
            return kernels.make_matrix_mul, (a.meta["spec"].shape, left, b.meta["spec"].shape, right), [a, b]
        found = MAKERS[type(op)](op, node.meta["spec"], *specs) if type(op) in MAKERS else None
        if found is None:
            raise self._unsupported(op)
        make, *args = found
        return make, tuple(args), list(node.args)

    @staticmethod
    def _matrix(node: Node) -> tuple[Node, bool]:
        """The operand of a product that is stored, and whether the product reads it transposed."""
        if node.kind == "op" and isinstance(node.target, Transpose):
            return node.args[0], True
        return node, False

    @staticmethod
    def _unsupported(op: Op) -> Unsupported:
        known = ", ".join(sorted({c.__name__ for c in MAKERS} | {"MatMul", "Reshape"}))
        return Unsupported(f"[executor] has no kernel for {op.label} with these attributes; it has {known}.")

    # -- runs ------------------------------------------------------------------------------------------------------------

    def run(self, feed_dict: Mapping[Symbol, Any], convert_to_numpy_ret_vals: bool = False) -> list[Any]:
        """The evaluated nodes, fresh tvm tensors (or numpy arrays), from arrays for the variables (tvm's or numpy's)."""
        shapes = {s: tuple(a.shape) for s, a in feed_dict.items()}
        if shapes != self.feed_shapes or (not self.node_to_arr_map and not self.steps):
            self.memory_plan(shapes)
        arrays: dict[Node, Any] = {**self.node_to_arr_map, **self.constants}
        for symbol, node in self.inputs.items():
            arrays[node] = self._fed(feed_dict[symbol])
        for n in self.outputs:
            base = self._base(n)
            if base.kind == "op":
                arrays[base] = self._empty(base)
        for step in self.steps:
            step.kernel(*[self._array(arrays, n) for n in step.inputs], self._array(arrays, step.out))
        results = [self._array(arrays, n) for n in self.outputs]
        return [r.numpy() for r in results] if convert_to_numpy_ret_vals else results

    def _fed(self, array: Any) -> Any:
        if isinstance(array, tvm.runtime.Tensor):
            return array
        if self.target != "llvm":
            return tvm.runtime.tensor(np.ascontiguousarray(array, "float32"), self.ctx)
        return tvm.runtime.from_dlpack(NDArray(array, dtype="float32"))  # aligned, and copied faster than by TVM

    def _array(self, arrays: dict[Node, Any], node: Node) -> Any:
        if node not in arrays:  # a reshaped node
            arrays[node] = arrays[self._base(node)]._create_view(node.meta["spec"].shape)
        return arrays[node]
