"""Symbols: tensors that record instead of computing; `symbolic` and `trace` make graphs with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from needle.autograd import Op, Spec, Tensor, TensorTuple, Unsupported
from needle.backend_ndarray import FLOATS
from needle.complex_numbers import is_complex, parts
from needle.op import TAPE, remembering

from .graph import Dim, Graph, Node
from .structure import map_structure


class Symbol(Tensor):
    """A tensor without data. `spec` is known when tracing, or when an example is at hand."""

    def __init__(self, node: Node, recorder: Recorder, spec: Spec | None) -> None:
        self.node, self.recorder, self.spec = node, recorder, spec
        self._init(None, None, (), False)

    @property
    def shape(self) -> Any:
        return self.recorder.shape(self)

    def __len__(self) -> int:
        size = super().__len__()
        return size + 0 if self.recorder.static else size  # a number of rows that values count refuses

    @property
    def ndim(self) -> int:
        if self.spec is None:
            raise Unsupported(f"the rank of {self.node.name} is not known; pass example=")
        return self.spec.ndim

    @property
    def dtype(self) -> str:
        if self.spec is None:
            raise Unsupported(f"the dtype of {self.node.name} is not known; pass example=")
        return self.spec.dtype

    @property
    def device(self) -> Any:
        from needle.backend_selection import default_device

        return self.recorder.device or default_device()

    def detach(self) -> Tensor:
        from needle.ops import stop_gradient

        return Symbol(self.node, self.recorder, self.spec) if self.recorder.static else stop_gradient(self)

    def cotangent(self, gradient: Any = None) -> Tensor:
        from needle.ops import cast_like, full_like

        return full_like(self, 1.0).detach() if gradient is None else cast_like(gradient, self)

    def numpy(self) -> Any:
        raise Unsupported(f"the value of {self.node.name} is not known while recording")

    def __repr__(self) -> str:
        return f"Symbol({self.node.name})"


def later(op: Op) -> Any:
    """What the tape has in the place of an op that has no gradient until sizes are known."""
    from needle.ops.pulled_back import PulledBackLater

    return PulledBackLater(op)


class SymbolTuple(Symbol):
    """The results of an op with several, as the tape has them."""

    items: tuple[Symbol, ...]
    dtype = property(lambda self: self.items[0].dtype)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Symbol:  # type: ignore[override]
        return self.items[index]

    def __iter__(self) -> Any:
        return iter(self.items)


class SymbolicShape:
    """The shape of a symbol of unknown rank: only single sizes can be asked for."""

    def __init__(self, symbol: Symbol) -> None:
        self.symbol = symbol

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            raise_unknown = index.stop is None or index.stop < 0 or (index.start or 0) < 0
            if raise_unknown and not (index.stop is None and (index.start or 0) < 0):
                raise Unsupported(f"the rank of {self.symbol.node.name} is not known; pass example=")
            stop = 0 if index.stop is None else index.stop
            return tuple(self[i] for i in range(index.start or 0, stop, index.step or 1))
        return self.symbol.recorder.size(self.symbol, index)

    def __iter__(self) -> Any:
        raise Unsupported(f"the rank of {self.symbol.node.name} is not known; pass example=")

    __len__ = __iter__


def check_number(value: Any, op: Op) -> None:
    """Raise Unsupported for a tensor among an op's attributes."""
    if isinstance(value, Symbol):
        raise Unsupported(
            f"{op.label} takes numbers that conversion knows, got the value of the tensor {value.node.name}"
        )


class Recorder:
    """Collects the ops applied to its symbols. `static`: shapes are the examples' (trace), else they stay free.

    device: where symbols are, by default on the default device.
    """

    def __init__(
        self, static: bool, leaf_paths: dict[int, str] | None = None, device: Any = None, trains: bool = False
    ) -> None:
        self.graph, self.static, self.device, self.trains = Graph(), static, device, trains
        self.leaf_paths = leaf_paths or {}  # id(module) -> path of the modules recorded as one node
        self.writes: dict[int, tuple[Tensor, Symbol]] = {}  # buffers that the call would have written
        self.effects: list[tuple[Any, Tensor]] = []  # what a plan does beside its results, each with the value for it
        self.guards: list[tuple[Any, Symbol]] = []  # values that have to be the expected ones
        self.draws: list[Callable[[], Any]] = []  # what makes the inputs that are drawn anew for every call
        self.rows: Any = None  # what knows of rows that values count, while a step's forward is recorded
        self.param_paths: dict[int, str] = {}
        self.modules: dict[int, Any] = {}  # called with symbols
        self._params: dict[int, Symbol] = {}
        self._made: list[Tensor] = []
        self._sizes: dict[tuple[Node, int], Dim] = {}

    def input(self, name: str, spec: Spec | None) -> Symbol:
        return self._symbol(self.graph.add("input", name, (), name), spec)

    def enter(self, examples: Any, names: Sequence[str] | None = None) -> Any:
        """The examples with a symbol for every array."""
        count = iter(range(1 << 30))

        def symbol(x: Any) -> Any:
            if not hasattr(x, "shape") or not hasattr(x, "dtype"):
                return x
            if is_complex(x):
                return map_structure(parts(x), symbol)
            i = next(count)
            spec = Spec(tuple(x.shape), str(x.dtype).removeprefix("torch."))
            return self.input(names[i] if names else f"x{i}", spec)

        return map_structure(examples, symbol)

    def draw(self, spec: Spec, make: Callable[[], Any]) -> Symbol:
        """An input that no caller gives: `make()` draws its array for every call, in the order of the graph."""
        self.draws.append(make)
        return self.input(f"random{len(self.draws) - 1}", spec)

    def _symbol(self, node: Node, spec: Spec | None) -> Symbol:
        node.meta["spec"] = spec
        return Symbol(node, self, spec)

    def param(self, tensor: Tensor) -> Symbol:
        """The symbol of a real tensor that takes part: a parameter, buffer or constant."""
        if id(tensor) in self.writes:
            return self.writes[id(tensor)][1]
        if id(tensor) not in self._params and tensor.op is not None:
            self._made.append(tensor)  # its id stays its own
            if isinstance(tensor.inputs[0], TensorTuple):  # made of parameters, which may change
                self._params[id(tensor)] = self.param(tensor.inputs[0])[tensor.op.index]  # type: ignore[index,attr-defined]
            else:
                self._params[id(tensor)] = self.record(tensor.op, tensor.inputs)
        if id(tensor) not in self._params:
            path = self.param_paths.get(id(tensor))
            node = self.graph.add("param", path or tensor, (), path or "constant")
            node.meta["tensor"] = tensor  # also keeps it alive, so that its id stays its own
            self._params[id(tensor)] = self._symbol(node, Spec(tuple(tensor.shape), tensor.dtype))
            self._params[id(tensor)].requires_grad = self.trains and tensor.requires_grad
        return self._params[id(tensor)]

    def current(self, x: Tensor) -> Symbol:
        """The value of a tensor that takes part, after what was written so far; x: the tensor, or its symbol from before."""
        tensor = x.node.meta.get("tensor") if isinstance(x, Symbol) else x
        return x if tensor is None else self.param(tensor)  # type: ignore[return-value]

    def write(self, tensor: Tensor, value: Symbol) -> None:
        """tensor: it, or its symbol, of before or as an earlier call has left it."""
        if isinstance(tensor, Symbol):
            left = {id(v): t for t, v in self.writes.values()}
            tensor = tensor.node.meta.get("tensor", left.get(id(tensor)))  # type: ignore[assignment]
        if tensor is not None:  # else only shapes are asked for
            self._keep(tensor)
            self.writes[id(tensor)] = (tensor, value)

    def _keep(self, tensor: Tensor) -> None:
        """Record what was made of a tensor alone while it has its value of before."""
        kept = {id(tensor)}
        for made in TAPE.remembered or ():  # in the order in which they were made
            if not kept.isdisjoint(map(id, made.inputs)):
                kept.add(id(made))
                self.param(made)

    def pop_writes(self) -> list[tuple[Tensor, Symbol]]:
        """The buffers that the call would have written, with what it would have written; `param` is the old value again."""
        writes, self.writes = list(self.writes.values()), {}
        return writes

    def record(self, op: Op, inputs: Sequence[Tensor]) -> Any:
        if self.rows is not None:
            made = self.rows.record(op, inputs)
            if made is not None:
                return made
        if op.must_decompose(*inputs):
            return op.decompose(*inputs)
        map_structure(op.attributes(), lambda v: check_number(v, op))
        symbols = [t if t.recorder is self else self.param(t) for t in inputs]
        needs_grad = TAPE.recording and any(s.requires_grad for s in symbols)
        composed = self.trains and needs_grad and not op.has_own_gradient
        if composed and (self.static or op.n_out > 1):
            return op.decompose(*symbols)
        specs = [s.spec for s in symbols]  # type: ignore[attr-defined]
        sizes = [d for d in op.deferred() if isinstance(d, Dim)]
        known = all(s is not None for s in specs) and all("example" in d.node.meta for d in sizes)
        out = op.resolve(self._example).infer(*specs) if known else specs[0] if op.like_first else None
        if op.counts and self.static:
            raise Unsupported(
                f"[{op.label}] the size of its result depends on values, which only graphs with free sizes have"
            )
        node = self.graph.add("op", op, tuple(s.node for s in symbols), op.label)  # type: ignore[attr-defined]
        if op.n_out == 1:
            made = self._symbol(node, out)
            if needs_grad and (out is None or out.dtype in FLOATS):
                made.op, made.inputs, made.requires_grad = later(op) if composed else op, tuple(symbols), True
            return made
        node.meta["spec"] = out
        from needle.ops import TupleGetItem

        picks = [TupleGetItem(i) for i in range(op.n_out)]
        nodes = [self.graph.add("op", p, (node,), f"{op.label}_{p.index}") for p in picks]
        items = tuple(self._symbol(n, out[i] if out else None) for i, n in enumerate(nodes))
        if needs_grad:
            whole = SymbolTuple(node, self, None)
            whole.op, whole.inputs, whole.requires_grad, whole.items = op, tuple(symbols), True, items
            for pick, item in zip(picks, items, strict=True):
                if item.spec is None or item.spec.dtype in FLOATS:
                    item.op, item.inputs, item.requires_grad = pick, (whole,), True
        return items

    def _example(self, deferred: Any) -> Any:
        return deferred.node.meta["example"] if isinstance(deferred, Dim) else deferred.value()

    def module(self, path: str, args: tuple, kwargs: dict, spec: Any = None) -> Any:
        """Record the call of a leaf module."""
        if kwargs:
            args = (*args, kwargs)
        node = self.graph.add("module", path, map_structure(args, self.to_node), path)
        return self._symbol(node, spec)

    def to_node(self, x: Any) -> Any:
        """The node of a tensor as it is now, before later writes."""
        if isinstance(x, Symbol):
            return x.node
        return self.param(x).node if isinstance(x, Tensor) else x

    def shape(self, symbol: Symbol) -> Any:
        if symbol.spec is None:
            return SymbolicShape(symbol)
        if self.static:
            return symbol.spec.shape if self.rows is None else self.rows.shape(symbol)
        return tuple(self.size(symbol, i) for i in range(symbol.spec.ndim))

    def size(self, symbol: Symbol, axis: int) -> Any:
        if symbol.spec is not None and axis < 0:
            axis += symbol.spec.ndim
        key = (symbol.node, axis)
        if key not in self._sizes:
            node = self.graph.add(
                "scalar", "size", (symbol.node, axis), f"{symbol.node.name}_size{axis}".replace("-", "m")
            )
            if symbol.spec is not None:
                node.meta["example"] = symbol.spec.shape[axis]
            self._sizes[key] = Dim(node, self.graph)
        return self._sizes[key]

    def pop_guards(self) -> list[tuple[Any, Symbol]]:
        guards, self.guards = self.guards, []
        return guards

    def finish(self, result: Any, effects: Sequence[Tensor] = ()) -> Graph:
        """The graph of `result`; `effects`: what is computed although the result does not read it."""
        args = (result, list(effects)) if effects else (result,)
        self.graph.add("output", "", map_structure(args, self.to_node), "output")
        return self.graph


def trace(
    fn: Callable,
    *examples: Any,
    names: Sequence[str] | None = None,
    recorder: Recorder | None = None,
    device: Any = None,
) -> Graph:
    """Record one call of `fn` at the shapes of `examples` (Tensors, arrays or Specs; nested ones are allowed).

    The graph has only input, param, op and output nodes; parameters are the real Tensors. Buffers that the call writes are
    extra outputs: the output is (result, [written values]) with `graph.output.meta["writes"]` the tensors; "modules" are those
    that were called, "effects" the recorder's.
    """
    recorder = Recorder(static=True, device=device) if recorder is None else recorder
    with remembering():
        result = fn(*recorder.enter(examples, names))
    if recorder.guards:
        raise Unsupported(
            f"[trace] a graph that holds for some inputs alone (`{recorder.guards[0][0].text}`) runs eagerly, compiled for "
            "inference, or in a file of exe.export."
        )
    if recorder.writes:
        written = [v for _, v in recorder.writes.values()]
        graph = recorder.finish((result, written))
        graph.output.meta["writes"] = [t for t, _ in recorder.writes.values()]
    else:
        graph = recorder.finish(result, [value for _, value in recorder.effects])
        graph.output.meta["effects"] = [effect for effect, _ in recorder.effects]
    graph.output.meta["modules"] = list(recorder.modules.values())
    return graph
