"""`torch.compile(model, backend="needle")`: the graphs that Dynamo hands over, compiled by needle where no gradient is needed."""

from __future__ import annotations

import importlib.metadata
import sys
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from needle import _core
from needle.autograd import Tensor, Unsupported
from needle.backend_ndarray.forks import GRAPHS, fork_lock
from needle.graph.narrow import NARROW
from needle.interop import as_ndarray, mirrored

from ..capture.differences import fault_of_results
from ..capture.nodes import written
from ..convert import convert, executable
from ..report import ConversionError
from .survey import Form, copies, is_vmap, leaves_torch_as_is, results_of, survey, why
from .whole import WHOLE

OPTIONS = {"fuse": True, "winograd": "auto", "memory": "normal", "watch": "content"}
WATCH = ("content", "version")
MAX_ENTRIES = 64  # sets of parameters for which one graph is kept compiled: blocks of one class share their graph
SAID: set[str] = set()


def backend(gm: fx.GraphModule, example_inputs: Sequence[Any], *, options: dict[str, Any] | None = None) -> Callable:
    """Dynamo's backend. options: `fuse`, `winograd`, `memory` as in `torch2needle.compile`; `watch`.

    Where a gradient is needed, the graph runs in torch. Parameters and buffers are packed, and packed again when they changed:
    with watch="content" every call reads those that are packed once, which sees any write; watch="version" compares the
    versions alone that torch keeps, which optimizers with fused=True and writes through `p.data` do not change.
    """
    chosen = {**OPTIONS, **(options or {})}
    unknown = chosen.keys() - OPTIONS.keys()
    if unknown:
        raise ValueError(f"[dynamo] options expects some of {', '.join(OPTIONS)}, got {min(unknown)}.")
    if chosen["watch"] not in WATCH:
        raise ValueError(f"[dynamo] watch expects {' or '.join(WATCH)}, got {chosen['watch']!r}.")
    if torch.is_grad_enabled() and needs_gradient(example_inputs):
        say("gradients are needed; for needle, call it under torch.no_grad() or torch.inference_mode()")
        return gm.forward
    return DynamoGraph(gm, example_inputs, chosen)


def say(reason: str) -> None:
    if reason not in SAID:
        SAID.add(reason)
        warnings.warn(f"[dynamo] a graph runs in torch: {reason}.", stacklevel=3)


def is_static(node: fx.Node, example: Any) -> bool:
    """A parameter or buffer of a module, which is the same tensor in most calls."""
    kind = (node.meta.get("tensor_dict") or {}).get("_dynamo_static_input_type")
    return isinstance(example, torch.Tensor) and (isinstance(example, torch.nn.Parameter) or kind is not None)


def is_shared(t: torch.Tensor) -> bool:
    """Whether needle can read a parameter where it lies; narrow integers are given at every call."""
    return str(t.dtype)[6:] not in NARROW


class DynamoGraph:
    """One graph of Dynamo, converted at its first call for each set of parameters."""

    def __init__(self, gm: fx.GraphModule, example_inputs: Sequence[Any], options: dict[str, Any]) -> None:
        self.gm, self.options = gm, {k: v for k, v in options.items() if k != "watch"}
        self.content = options["watch"] == "content"
        self.nodes = [n for n in gm.graph.nodes if n.op == "placeholder"]
        pairs = list(zip(self.nodes, example_inputs, strict=True))
        changed = {root for n in gm.graph.nodes if (root := written(n)) is not None}  # which are read and copied back
        self.static = [i for i, (n, e) in enumerate(pairs) if is_static(n, e) and n not in changed and is_shared(e)]
        self.inputs = [i for i, (_, e) in enumerate(pairs) if isinstance(e, torch.Tensor) and i not in self.static]
        self.numbers = [i for i, (_, e) in enumerate(pairs) if not isinstance(e, torch.Tensor)]
        self.maps = any(is_vmap(n) for n in gm.graph.nodes)
        self.sizes = {} if self.maps else sizes_of_inputs(self.nodes, self.numbers, self.inputs)
        # The numbers that the needle graph holds as constants.
        self.fixed = [i for i in self.numbers if i not in self.sizes]
        self.entries: OrderedDict[Any, Entry] = OrderedDict()
        self.lock = fork_lock(GRAPHS)

    def __call__(self, *args: Any) -> Any:
        static = [args[i] for i in self.static]
        key = (*map(id, static), *[args[i] for i in self.fixed])
        entry = self.entries.get(key) or self.add(key, args)
        if entry.exe is None or (torch.is_grad_enabled() and needs_gradient(args)):
            return self.gm.forward(*args)
        with self.lock:
            entry.follow(static, self.content)
        inputs = [args[i] for i in self.inputs]
        key = (*((*t.shape, *t.stride()) for t in inputs), *[args[i] for i in self.numbers])
        form = entry.forms.get(key) or entry.forms.setdefault(key, self.form(args))
        reason = form.reason or ("results lie in memory otherwise than at first" * (form.signature != entry.signature))
        if not reason and form.meets_others(args):
            reason = "an input that it writes shares memory with another one"
        if reason:
            say(reason)
            return self.gm.forward(*args)
        try:
            result = run(entry.exe, inputs)
            form.check(result)
        except Exception as e:  # a shape that no plan takes
            say(why(e))
            return self.gm.forward(*args)
        if self.content:
            with self.lock:
                entry.watch(static)
        return form.given(result, args)

    def form(self, args: tuple) -> Form:
        """What torch gives for these shapes: sizes and strides, on which Dynamo relies, or why torch has to run it."""
        return survey(self.gm, args, self.inputs, self.static)

    def add(self, key: Any, args: tuple) -> Entry:
        with self.lock:
            if key in self.entries:
                return self.entries[key]
            for k in [k for k, e in self.entries.items() if not e.alive()]:
                del self.entries[k]
            entry = Entry([args[i] for i in self.static])
            form = self.form(args)
            reason = form.reason
            try:
                if not reason:
                    self.build(entry, args, form)
            except Exception as e:
                entry.exe, reason = None, why(e)
            if reason:
                say(reason)
            key = (*key[: len(self.static)], *[args[i] for i in self.fixed])  # building may fix sizes
            self.entries[key] = entry
            if len(self.entries) > MAX_ENTRIES:
                self.entries.popitem(last=False)
            return entry

    def build(self, entry: Entry, args: tuple, form: Form) -> None:
        """Convert with free sizes by needle's rules alone, else with sizes fixed and torch for what has no rule."""
        inputs = tuple(args[i] for i in self.inputs)
        example = {self.nodes[i].name: args[i] for i in self.inputs}
        try:
            net = convert(self.rewrite(args, form), example, share=True)
        except ConversionError:
            self.sizes, self.fixed = {}, self.numbers
            net = convert(self.rewrite(args, form), example, share=True, fallback="torch")
            if net.report.capture == WHOLE:  # torch does that without a net
                raise Unsupported(net.report.rows[-1].reason) from None
        names = {id(args[i]): self.nodes[i].name for i in reversed(self.static)}  # of tied ones the first
        entry.tensors = [net.tensor(names[id(args[i])]) for i in self.static]
        exe = executable(net, inputs, **self.options)
        result = run(exe, inputs)
        form.check(result)
        if fault := self.fault(args, form, result):
            raise Unsupported(fault)
        entry.exe, entry.signature = exe, form.signature

    def fault(self, args: tuple, form: Form, result: Any) -> str:
        """How the results and the inputs that are written differ from torch's."""
        theirs, ours = (copies(args, self.inputs, data=True) for _ in range(2))
        with torch.inference_mode(False), torch.no_grad():
            wanted, given = results_of(self.gm.forward(*theirs)), list(form.given(result, tuple(ours)))
        written = form.memory.written
        return fault_of_results([*given, *(ours[i] for i in written)], [*wanted, *(theirs[i] for i in written)])

    def rewrite(self, args: tuple, form: Form) -> fx.GraphModule:
        """The graph with parameters and buffers as attributes, and numbers as sizes of inputs or constants."""
        graph, gm = fx.Graph(), self.gm
        done: dict[fx.Node, Any] = {}
        attributes: dict[str, Any] = {}
        if self.maps:  # as calls for whole batches, of these sizes
            if not form.plain:
                raise Unsupported("beside torch.vmap it writes inputs or gives views of them")
            with torch.inference_mode(False), torch.no_grad():
                gm = make_fx(gm, tracing_mode="fake")(*args)
        for i, node in enumerate(self.nodes):
            if i in self.inputs:
                done[node] = graph.placeholder(node.name)
        for i, node in enumerate(self.nodes):
            if i in self.static:
                attributes[node.name] = args[i]
                done[node] = graph.get_attr(node.name)
            elif i in self.sizes:
                tensor, axis = self.sizes[i]
                done[node] = graph.call_method("size", (done[self.nodes[tensor]], axis))
            elif i in self.numbers:
                done[node] = args[i]
        for old, new in zip(self.nodes, gm.graph.find_nodes(op="placeholder"), strict=True):
            done[new] = done[old]
        for node in gm.graph.nodes:
            if node.op == "placeholder" or node.target is torch._C._set_grad_enabled or leaves_torch_as_is(node):
                continue
            if node.op in ("get_attr", "call_module"):
                attributes[str(node.target)] = attrgetter(str(node.target))(gm)
            if node.op == "output":
                graph.output(fx.map_arg(form.outputs(node.args[0], self.nodes), lambda n: done[n]))
            else:
                done[node] = graph.node_copy(node, lambda n: done[n])
        made = fx.GraphModule(attributes, graph)
        made.training = False
        return made


def run(exe: Any, inputs: Sequence[torch.Tensor]) -> Any:
    """The results as torch's tensors, also where no input tells whose arrays they are to be."""
    return exe(*inputs) if inputs else mirrored(exe(), "torch")


class Entry:
    """A graph compiled over one set of parameters; `exe` is None where torch runs it."""

    def __init__(self, static: list[torch.Tensor]) -> None:
        self.exe: Any = None
        self.signature: Any = None  # of the results' memory
        self.tensors: list[Tensor] = []  # needle's, over the memory of torch's
        self.forms: dict[Any, Form] = {}  # by shapes and strides of the inputs
        self.stamps = stamps_of(static)  # versions and addresses of torch's
        self.constants = 0  # of the executable, when it was last looked at
        self.memory: dict[int, np.ndarray] = {}  # of those parameters that it copied, by number
        self.digests: list[int] = []  # what that memory held
        self.owners = [weakref.ref(t) for t in static]

    def alive(self) -> bool:
        return all(o() is not None for o in self.owners)

    def follow(self, static: list[torch.Tensor], content: bool) -> None:
        """Give needle the present memory of the parameters that changed; the executable packs them again."""
        n, stamps = len(static), stamps_of(static)
        changed = {i for i in range(n) if (stamps[i], stamps[n + i]) != (self.stamps[i], self.stamps[n + i])}
        if content:
            self.memory |= {i: memory_of(static[i]) for i in changed & self.memory.keys()}
            digests = _core.digests(list(self.memory.values()))
            changed |= {i for i, a, b in zip(self.memory, digests, self.digests, strict=True) if a != b}
            self.digests = digests
        for i in changed:
            t = torch.view_as_real(static[i]) if static[i].is_complex() else static[i]  # needle's lie in pairs
            self.tensors[i].data = Tensor.make_const(as_ndarray(t))
        self.stamps = stamps

    def watch(self, static: list[torch.Tensor]) -> None:
        """After a run that may have made a plan: note what it copied of the parameters."""
        made = self.exe._pool.constants
        if len(made) != self.constants:
            copied = {id(t) for t in derived_from(list(made.values()))}
            self.memory = {i: memory_of(static[i]) for i, t in enumerate(self.tensors) if id(t) in copied}
            self.digests = _core.digests(list(self.memory.values()))
            self.constants = len(made)


def derived_from(constants: list[Any]) -> list[Tensor]:
    """The parameters of which an executable holds copies in another form; it reads the others where they are."""
    found: list[Tensor] = []
    left = [i for c in constants if c.source is None for i in c.inputs]
    while left:
        c = left.pop()
        found += [c.source] if c.source is not None else []
        left += c.inputs
    return found


def memory_of(t: torch.Tensor) -> np.ndarray:
    return torch.empty(0, dtype=torch.uint8).set_(t.untyped_storage()).numpy()  # type: ignore[call-overload]


def stamps_of(tensors: list[torch.Tensor]) -> list[int]:
    """What a change of the tensors changes: all versions, then all addresses."""
    return [*map(attrgetter("_version"), tensors), *map(torch.Tensor.data_ptr, tensors)]


def needs_gradient(args: Sequence[Any]) -> bool:
    return any(isinstance(t, torch.Tensor) and t.requires_grad for t in args)


def sizes_of_inputs(nodes: list[fx.Node], numbers: list[int], inputs: list[int]) -> dict[int, tuple[int, int]]:
    """The numbers that are sizes of inputs: index -> (index of the input, axis)."""

    def symbol(x: Any) -> Any:
        return x.node.expr if isinstance(x, torch.SymInt) else None

    axes = {symbol(size): (i, axis) for i in inputs for axis, size in enumerate(nodes[i].meta["example_value"].shape)}
    found = {i: axes.get(symbol(nodes[i].meta.get("example_value"))) for i in numbers}
    return {i: place for i, place in found.items() if place and symbol(nodes[i].meta["example_value"]) is not None}


class InTree(importlib.metadata.Distribution):
    """Shows Dynamo the entry point when this package is imported from a folder where it was not installed."""

    def read_text(self, filename: str) -> str | None:
        texts = {
            "METADATA": "Name: torch2needle",
            "entry_points.txt": "[torch_dynamo_backends]\nneedle = torch2needle.dynamo:backend",
        }
        return texts.get(filename)

    def locate_file(self, path: Any) -> Any:
        return path


class Finder(importlib.metadata.DistributionFinder):
    def find_spec(self, *args: Any) -> None:
        return None

    def find_distributions(self, context: Any = None) -> Iterator[InTree]:
        return iter([] if context is not None and context.name else [InTree()])


def register() -> None:
    """Make the name known; torch._dynamo takes a second or more to import, so it finds the name when it is needed."""
    if "torch._dynamo" not in sys.modules:
        sys.meta_path.append(Finder())
        return
    from torch._dynamo.backends import registry

    if "needle" not in registry._BACKENDS:
        registry.register_backend(backend, name="needle")


register()
