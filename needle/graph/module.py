"""GraphModule: a graph and the submodule tree it calls. `symbolic` makes one from any needle module."""

from __future__ import annotations

import inspect
import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from typing import Any

from needle.autograd import Deferred, Spec, Tensor, Unsupported
from needle.complex_numbers import Complex
from needle.nn.functional import GuardError
from needle.nn.module import HOOKS, STRUCTURE, Module, find_recorder
from needle.nn.tree import Numbered, Tree, set_submodule
from needle.op import kind_of, map_deferred, remembering

from .graph import SCALAR_OPERATORS, Dim, Graph, Node, describe_target
from .inputs import Inputs
from .narrow import is_narrow, name_of, narrow_fault
from .record import Recorder, Symbol
from .structure import map_structure

SHOWN = 40  # lines of either end of a graph in a `repr`


class Mode(Deferred):
    """The training flag of a module, read when the graph runs."""

    def __init__(self, module: Module, path: str) -> None:
        self.module, self.path = module, path

    def value(self) -> bool:
        return self.module.training

    def __repr__(self) -> str:
        return f"training({self.path})"


# What a GraphModule keeps of its graph; where training and evaluation have graphs of their own, for each.
OF_GRAPH = ("_graph", "_inputs", "_report", "_only", "_taken", "_last_use", "fusion_report")


class GraphModule(Numbered):
    """Interprets its graph, eagerly on tensors and by recording on symbols. Trainable; batch and sizes stay free.

    A model that computes something else in training than in evaluation has a graph for each, between which `train()` and
    `eval()` of the whole choose; `graph`, `report`, `fusion_report` and all that is made of the net are those of its mode.
    """

    container = True
    fusion_report: Any = None  # set by operator_fusion.fuse
    otherwise: Callable[[GraphModule, list[Any]], Any] | None = None  # gives the result for inputs that a guard refuses

    def __init__(self, graph: Graph, root: Module, added: Mapping[str, Module] | None = None) -> None:
        """`added`: layers that the graph calls beside those of `root`."""
        super().__init__()
        for name, value in root.__dict__.items():
            if not name.startswith("_") or name in ("_public", "_transient") or name in root._public:
                held = isinstance(value, list | dict) and not root.member_name(name)  # a container's members are ours
                self.__dict__.update({n: v for n, v in root.members() if "." not in n} if held else {name: value})
        self.__dict__.update(added or {})
        self._graph, self._inputs = graph, Inputs(graph, type(self).__name__)
        self._report: Any = None
        self._only: bool | None = None  # the one mode of training that the graph holds for
        self._spare: dict[str, Any] = {}  # OF_GRAPH of the other mode, where that has a graph of its own
        own = type(self if type(root) is Tree else root).__name__
        self._title: str = getattr(root, "_title", own)  # what profiles and reports call the model
        self._taken: set[tuple[str, ...]] = set()  # dtypes of inputs, some of them narrow, that the graph may take
        self._last_use = last_uses(graph)
        self._tensors: dict[str, Tensor] | None = None
        self._modules: dict[str, Module] = {}
        self._find()

    def with_graph(self, graph: Graph) -> GraphModule:
        """The same module, layers, hooks and report with another graph."""
        made = GraphModule(graph, self)
        made._report, made._only, made.otherwise = self._report, self._only, self.otherwise
        made.__dict__.update({name: self.__dict__[name] for name in HOOKS if name in self.__dict__})
        return made

    def with_modes(self, net: GraphModule | None, training: bool | None = None) -> GraphModule:
        """This net, whose graph holds for `training` alone where that is no None, with that of `net`, of the same layers, for the
        other mode."""
        self._only = self._only if training is None else training
        if net is not None:
            self._spare = {k: getattr(net, k) for k in OF_GRAPH} | {"_only": not self._only}
        return self

    @property
    def holds_for(self) -> bool | None:
        """The one mode of training that the graph holds for; None for both."""
        return self._only

    @property
    def in_other_mode(self) -> GraphModule | None:
        """The same layers and mode with the graph of the other mode, where that has one of its own."""
        if not self._spare:
            return None
        made = self.with_graph(self._spare["_graph"])
        made.__dict__.update(self._spare)
        return made

    def on_layers_of(self, net: GraphModule, shared: Set[str]) -> GraphModule:
        """This graph over the layers of `net`, which are alike at the paths `shared`; those beside them go there, too."""
        names = {}
        for path, layer in self._modules.items():
            if path not in shared:
                names[path] = path if path not in net._modules else free_path(net, path)
                set_submodule(net, names[path], layer)
                layer.training = net.training

        def follow(d: Deferred) -> Deferred:
            if not isinstance(d, Mode):
                return d
            path = names.get(d.path, d.path)
            return Mode(net.get_submodule(path), path)

        def replace(node: Node, new: Graph, done: dict[Node, Node]) -> Node:
            made, module = new.copy_node(node, done), node.kind == "module"
            made.target = names.get(node.target, node.target) if module else map_deferred(made.target, follow)
            return made

        made = GraphModule(self.graph.copy(replace), net)
        made.__dict__.update({k: getattr(self, k) for k in ("_report", "_only", "_taken")})
        return made

    def train(self, mode: bool = True) -> Module:
        self.warn_of_mode(mode, "train" if mode else "eval")
        if self._spare and mode != self._only:
            ours = {k: getattr(self, k) for k in OF_GRAPH}
            self.__dict__.update(self._spare)
            self._spare = ours
            self._find()
        return super().train(mode)

    def check_evaluation(self, label: str) -> None:
        super().check_evaluation(label)
        if self._spare and self._only:
            raise ValueError(f"[{label}] the net is in training mode, which has a graph of its own; call net.eval().")

    def warn_of_mode(self, training: bool, label: str) -> None:
        """Warns where the graph holds for the other mode alone."""
        if self._only is not None and training != self._only and not self._spare:
            has, lacks = ("training", "evaluation") if self._only else ("evaluation", "training")
            text = f"the graph was captured in {has} mode and stays so; what the model does in {lacks} alone"
            warnings.warn(f"[{label}] {text} is not in it.", stacklevel=3)

    @property
    def graph(self) -> Graph:
        return self._graph

    @property
    def report(self) -> Any:
        return self._report

    @property
    def input_names(self) -> list[str]:
        return list(self._inputs.names)

    def takes_by_name(self, example: dict[str, Any]) -> bool:
        """Whether that is inputs by their names, and not the one input that a dict is."""
        return not example.keys().isdisjoint(self.input_names) and (len(self.input_names) > 1 or self._inputs.flat)

    def _find(self) -> None:
        """Look up the submodules that the graph calls."""
        self._modules = {n.target: self.get_submodule(n.target) for n in self._graph if n.kind == "module"}
        self._tensors, self._found_at = None, STRUCTURE.members
        for _, m in self.named_modules():
            m.__dict__["_watched"] = True

    def tensor(self, path: str) -> Tensor:
        """The parameter or buffer at `path`, looked up once."""
        if self._tensors is None:
            self._tensors = dict(self.named_tensors())
        if path not in self._tensors:
            raise KeyError(f"[module] there is no parameter or buffer named {path}.")
        return self._tensors[path]

    def constant(self, node: Node) -> Tensor:
        """The tensor of a param node."""
        return self.tensor(node.target) if isinstance(node.target, str) else node.target

    def _constants(self) -> list[Tensor]:
        graphs = [self._graph, *([self._spare["_graph"]] if self._spare else [])]
        return [n.target for g in graphs for n in g if n.kind == "param" and isinstance(n.target, Tensor)]

    def bind(self, args: tuple, kwargs: dict) -> list[Any]:
        """One value per graph input, from a call's arguments."""
        values = self._inputs.bind(args, kwargs)
        if any(map(is_narrow, values)):
            dtypes = tuple(name_of(getattr(v, "dtype", "")) for v in values)
            if dtypes not in self._taken:
                if fault := narrow_fault(self._graph, self, dict(zip(self._graph.inputs, dtypes, strict=True))):
                    raise TypeError(f"[{type(self).__name__}] {fault}.")
                self._taken.add(dtypes)
        return values

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        values = self.bind(args, kwargs)
        try:
            return self._interpret(values)
        except GuardError as e:
            if find_recorder(values) is not None:  # a size's, while a plan is made
                raise
            return self.answer(values, e)

    def answer(self, values: list[Any], refused: GuardError) -> Any:
        """The result for inputs that a guard refuses, or its error; in training, too."""
        if self.otherwise is None or any(m.training for m in self.modules()):
            raise refused
        return self.otherwise(self, values)

    def run(self, *args: Any, watch: Callable[[Node, Any], Any], **kwargs: Any) -> Any:
        """The result of a call; `watch(node, value)` is called after each node, in the graph's order."""
        return self._interpret(self.bind(args, kwargs), watch)

    def _interpret(self, values: list[Any], watch: Callable[[Node, Any], Any] | None = None) -> Any:
        from needle.interop import as_tensor

        if self._found_at != STRUCTURE.members:
            self._find()
        recorder = find_recorder(values)
        given = [as_tensor(v) for v in values]
        for node, v in zip(self._graph.inputs, given, strict=True):
            if isinstance(v, Complex):
                raise TypeError(f"[{type(self).__name__}] input {node.target} expects real numbers, got {v.dtype}.")
            if not isinstance(v, Tensor):
                raise TypeError(f"[{type(self).__name__}] input {node.target} expects an array, got {kind_of(v)}.")
        inputs = iter(given)
        env: dict[Node, Any] = {}
        for node in self._graph:
            env[node] = self._evaluate(node, env, inputs)
            if recorder is not None and node.kind == "param":  # else what is made of parameters alone would be frozen
                env[node] = recorder.param(env[node])
            if watch is not None:
                watch(node, env[node])
            for done in self._last_use.get(node, ()):
                del env[done]
        return env[self._graph.output]

    def _evaluate(self, node: Node, env: dict[Node, Any], inputs: Any) -> Any:
        if node.kind == "op":
            read = [current(env[a]) for a in node.args]
            op = node.target.resolve(lambda d: env[d.node] if isinstance(d, Dim) else d.value())
            # the outputs of a recorded op are a plain tuple
            return read[0][op.index] if isinstance(read[0], tuple) else op(*read)
        if node.kind == "param":
            return self.constant(node)
        if node.kind == "input":
            return next(inputs)

        def value(x: Any) -> Any:
            if isinstance(x, Node):
                return env[x]
            return env[x.node] if isinstance(x, Dim) else x

        if node.kind == "scalar":
            a, b = (value(x) for x in node.args)
            return a.shape[b] if node.target == "size" else SCALAR_OPERATORS[node.target](a, b)
        args = map_structure(node.args, value)
        if node.kind == "output":
            return args[0]
        kwargs = args[-1] if args and isinstance(args[-1], dict) else {}
        return self._modules[node.target](*(args[:-1] if kwargs else args), **kwargs)

    def __str__(self) -> str:
        return f"{type(self).__name__}(\n{self._graph}\n)"

    def __repr__(self) -> str:
        """As `str`, without the middle of a long one."""
        lines = str(self).splitlines()
        left_out = len(lines) - 2 * SHOWN
        return "\n".join(
            [*lines[:SHOWN], f"... {left_out} more, print(net) has all", *lines[-SHOWN:]] if left_out > 1 else lines
        )


def free_path(net: Module, path: str) -> str:
    """A path beside `path` at which `net` has nothing."""
    taken = {p for p, _ in net.named_modules()}
    return next(p for i in itertools.count() if (p := f"{path}_{i}") not in taken)


def current(x: Any) -> Any:
    """A parameter's symbol as what was written to it, by a layer before: as eager calls read it."""
    return x.recorder.current(x) if isinstance(x, Tensor) and x.recorder is not None else x


def last_uses(graph: Graph) -> dict[Node, list[Node]]:
    """For each node, the nodes that nothing reads after it."""
    last: dict[Node, Node] = {}
    for node in graph:
        for i in node.inputs():
            last[i] = node
    uses: dict[Node, list[Node]] = {}
    for node, user in last.items():
        uses.setdefault(user, []).append(node)
    return uses


def record_module(recorder: Recorder, path: str, args: tuple, kwargs: dict, module: Module) -> Any:
    spec = None
    symbols = [a for a in args if isinstance(a, Symbol)]
    if symbols and all(s.spec is not None for s in symbols) and len(symbols) == len(args):
        inner = Recorder(static=True)
        out = module.forward(*(inner.input("x", s.spec) for s in symbols), **kwargs)
        spec = out.spec if isinstance(out, Symbol) else None
    return Recorder.module(recorder, path, args, kwargs, spec)


class ModuleRecorder(Recorder):
    """Records a module tree: leaf modules become nodes, parameters used directly become `param` nodes with paths."""

    def __init__(self, root: Module) -> None:
        super().__init__(static=False)
        self.root = root
        self.leaf_paths = {id(m): p for p, m in root.named_modules() if m.is_leaf and p}
        self.param_paths = {id(t): p for p, t in root.named_tensors()}
        self.calls: dict[str, int] = {}  # how often each layer was called so far

    def module(self, path: str, args: tuple, kwargs: dict, module: Any = None) -> Any:
        before = len(self.graph.nodes)
        result = record_module(self, path, args, kwargs, module)
        count = self.calls[path] = self.calls.get(path, 0) + 1
        for node in self.graph.nodes[before:]:
            if node.kind == "module":  # a fused node keeps the meta of the last call it covers
                node.meta |= {"path": path, "call": count - 1}
        return result


def symbolic(module: Module, example: tuple | None = None) -> GraphModule:
    """A GraphModule that calls the same layers and parameters as `module`; batch and sizes stay free.

    Where its forwards compute something else in training than in evaluation, each mode has a graph. Raises Unsupported where
    `module` is one layer, or such a one trains in part.
    """
    if isinstance(module, GraphModule):
        return module
    if module.is_leaf:
        raise Unsupported(f"{type(module).__name__} is one layer; wrap it in nn.Sequential to make a graph")
    graph, added = record(module, example)
    with other_modes(module):
        other, beside = record(module, example)
    net = GraphModule(graph, module, beside | added)
    if calls(other) == calls(graph):
        return net
    if len({m.training for m in module.modules()}) > 1:
        raise Unsupported(
            f"{type(module).__name__} computes something else in training than in evaluation; call train() or eval() of the whole"
        )
    return net.with_modes(GraphModule(other, module, beside), net.training)


def record(module: Module, example: tuple | None) -> tuple[Graph, dict[str, Module]]:
    """The graph of a call, and the layers that it calls for the buffers that the call writes."""
    from needle.nn import WriteBuffer

    recorder = ModuleRecorder(module)
    names = [p.name for p in inspect.signature(module.forward).parameters.values() if p.default is p.empty]
    specs = [Spec(tuple(e.shape), str(e.dtype)) for e in example] if example else [None] * len(names)
    with remembering():
        result = module(*(recorder.input(n, s) for n, s in zip(names, specs, strict=True)))
    added: dict[str, Module] = {}
    effects = []
    free = (f"write_{i}" for i in itertools.count() if f"write_{i}" not in vars(module))
    for name, (buffer, value) in zip(free, recorder.pop_writes()):  # noqa: B905 - there are always more names
        added[name] = WriteBuffer()
        effects.append(recorder.module(name, (recorder.param(buffer), value), {}, added[name]))
    return recorder.finish(result, effects), added


def calls(graph: Graph) -> list[tuple[str, str, str]]:
    return [(n.kind, describe_target(n), repr(n.args)) for n in graph]


@contextmanager
def other_modes(module: Any) -> Iterator[None]:
    """Every module of the tree, needle's or torch's, trains if it evaluated, and the other way round."""
    flags = [(m.__dict__, m.training) for _, m in module.named_modules()]  # not told to executables
    try:
        for attributes, training in flags:
            attributes["training"] = not training
        yield
    finally:
        for attributes, training in flags:
            attributes["training"] = training
