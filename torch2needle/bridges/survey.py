"""What a graph of Dynamo does for inputs of some shapes, told by a run without data: its results, whose memory they lie in, what
it writes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from needle.autograd import Unsupported
from needle.graph.narrow import NARROW
from needle.serialize import DTYPES

from ..capture.guard import draws
from ..report import ConversionError, reason_of
from ..rules.registry import target_name
from .fallback import spec_of, tensor_leaves

TAKEN = {*DTYPES.values(), "complex64", "complex128"}


class Place(NamedTuple):
    """Where a result lies: in input `number`, or in value `number` of those that the plan computes.

    geometry: its sizes, strides and offset there; None for that tensor itself.
    """

    fresh: bool
    number: int
    geometry: tuple | None

    def view(self, t: torch.Tensor) -> torch.Tensor:
        if self.geometry is None:
            return t
        sizes, strides, offset = self.geometry
        return t.as_strided(sizes, strides, t.storage_offset() + offset)


class Memory(NamedTuple):
    """places: of every result; None for what is no tensor. made: for each value that the plan computes the number of the result
    that it is, or the node that gives it. written: the inputs that the graph writes."""

    places: list[Place | None]
    made: list[int | fx.Node]
    written: list[int]

    @property
    def signature(self) -> tuple:
        """What it is whatever the sizes."""
        where = [p and (p.fresh, p.number, p.geometry is None) for p in self.places]
        return tuple(where), tuple(m if isinstance(m, int) else m.name for m in self.made), tuple(self.written)

    @property
    def plain(self) -> bool:
        """Every result has memory of its own, and nothing is written."""
        whole = all(p is None or (p.fresh and p.geometry is None) for p in self.places)
        return whole and not self.written and len(self.made) == sum(p is not None for p in self.places)


class Form:
    """The results that torch gives for inputs of some shapes, or the reason why torch has to run the graph."""

    def __init__(
        self, reason: str, memory: Memory | None = None, made: Sequence[Any] = (), kept: Sequence[Any] = ()
    ) -> None:
        """made: the values that a plan computes; kept: the inputs that are written."""
        self.memory = memory or Memory([], [], [])
        self.plain, self.signature = self.memory.plain, self.memory.signature
        self.specs = [spec_of(t) for t in (*made, *kept)]
        self.strides = [t.stride() for t in made]
        self.dense = all(t.is_contiguous() for t in made)
        overlap = any(map(overlaps, kept)) or any(overlaps(t.as_strided(*dense(t))) for t in made)
        self.reason = reason or ("elements of a result share memory" if overlap else "")

    def check(self, result: Any) -> None:
        made = [spec_of(t) for t in tensor_leaves(result)]
        if made != self.specs:
            raise Unsupported(f"its results would be {made} instead of {self.specs}")

    def given(self, result: Any, args: tuple) -> Any:
        """The results in torch's strides and in the memory in which torch gives them."""
        if self.plain and self.dense:
            return result
        strides = iter(self.strides)

        def restrided(t: Any) -> Any:
            if not isinstance(t, torch.Tensor):
                return t
            want = next(strides)
            if t.stride() == want:
                return t
            once = t[tuple(slice(None) if s else slice(1) for s in want)]  # along an axis without a stride all are one
            return torch.empty_strided(once.shape, want, dtype=t.dtype).copy_(once).expand(t.shape)

        if self.plain:
            return tree_map(restrided, result)
        fresh, values, others = result
        made = list(map(restrided, fresh))
        for i, value in zip(self.memory.written, values, strict=True):
            args[i].copy_(value)
        pairs = zip(self.memory.places, others, strict=True)
        return tuple(x if p is None else p.view(made[p.number] if p.fresh else args[p.number]) for p, x in pairs)

    def outputs(self, results: Sequence[Any], inputs: Sequence[fx.Node]) -> Any:
        """What the plan's graph gives; results: of Dynamo's graph."""
        if self.plain:
            return tuple(results)
        made = [results[m] if isinstance(m, int) else m for m in self.memory.made]
        others = [None if p else r for p, r in zip(self.memory.places, results, strict=True)]
        return made, [inputs[i] for i in self.memory.written], others

    def meets_others(self, args: tuple) -> bool:
        """Whether an input that is written may share memory with another one."""
        if not self.memory.written:
            return False
        storages = [storage(t) for t in args if isinstance(t, torch.Tensor) and t.numel()]
        return len(set(storages)) < len(storages)


class Beside(TorchDispatchMode):
    """Notes what ops do beside their results that no version tells: random numbers, running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags and draws(func, args, kwargs):
            self.notes.append(f"it draws random numbers ({func.__name__})")
        given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
        if given.get("running_mean") is not None and (given.get("training") or given.get("train")):
            self.notes.append(f"it updates running statistics ({func.__name__})")
        return func(*args, **kwargs)


def survey(gm: fx.GraphModule, args: tuple, inputs: list[int], static: list[int]) -> Form:
    """inputs: the numbers of those arguments that may change; static: of parameters and buffers, which may not."""
    if reason := reason_for_torch(gm, args, inputs, static):
        return Form(reason)
    beside, run, gradients = Beside(), fx.Interpreter(gm, garbage_collect_values=False), torch.is_grad_enabled()
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        with torch.inference_mode(False), torch.set_grad_enabled(gradients), fake, beside:
            ins = copies(args, range(len(args)), data=False)
            for t, own in zip(ins, args, strict=True):
                if isinstance(t, torch.Tensor) and own.requires_grad:
                    t.requires_grad_()
            versions = [t._version if isinstance(t, torch.Tensor) else 0 for t in ins]
            outs = results_of(run.run(*ins))
            if torch.is_grad_enabled() != gradients or any(t.grad_fn is not None for t in tensor_leaves(outs)):
                return Form("it switches gradients on for what comes after it")
        if beside.notes:
            return Form(beside.notes[0])
        changed = [i for i, t in enumerate(ins) if isinstance(t, torch.Tensor) and t._version != versions[i]]
        written = [i for n, i in enumerate(changed) if all(ins[i] is not ins[j] for j in changed[:n])]
        if not set(written) <= set(inputs):
            return Form("it writes a parameter or buffer")
        if narrow := next((ins[i].dtype for i in written if str(ins[i].dtype)[6:] in NARROW), None):
            return Form(f"it writes an input of dtype {narrow}")
        memory = memory_of(ins, outs, written, run.env)
        # Of a batch norm torch foretells other strides.
        if not all(t.is_contiguous() for t in tensor_leaves((outs, [args[i] for i in inputs]))):
            with torch.inference_mode(False), torch.no_grad():
                ins = copies(args, inputs, data=True)
                env: dict[fx.Node, Any] = {}
                needed = {m for m in memory.made if isinstance(m, fx.Node)}
                outs = results_of(Watched(gm, needed, env).run(*ins))
            told, memory = memory, memory_of(ins, outs, written, env)
            if told.signature != memory.signature:
                return Form("its results lie in other memory than torch foretells")
            run.env = env
    except Exception as e:
        return Form(why(e))
    made = [outs[m] if isinstance(m, int) else run.env[m] for m in memory.made]
    if bad := [t.dtype for t in made if str(t.dtype)[6:] not in TAKEN]:
        return Form(f"a result has dtype {bad[0]}")
    return Form("", memory, made, [ins[i] for i in written])


class Watched(fx.Interpreter):
    """Keeps the values of some nodes."""

    def __init__(self, gm: fx.GraphModule, nodes: set[fx.Node], found: dict[fx.Node, Any]) -> None:
        super().__init__(gm)
        self.nodes, self.found = nodes, found

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n in self.nodes:
            self.found[n] = value
        return value


def copies(args: tuple, numbers: Iterable[int], data: bool) -> list[Any]:
    """The arguments, those of `numbers` in memory of their own (one that is given twice as one); data: with their values."""
    made: dict[int, torch.Tensor] = {}
    for t in (args[i] for i in numbers):
        if isinstance(t, torch.Tensor) and id(t) not in made:
            made[id(t)] = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype)
            if data:
                made[id(t)].as_strided(*dense(t)).copy_(t.detach().as_strided(*dense(t), t.storage_offset()))
    return [made.get(id(a), a) for a in args]


def overlaps(t: torch.Tensor) -> bool:
    return bool(t.numel()) and torch._debug_has_internal_overlap(t) == 1


def dense(t: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes and strides of what a tensor holds, each element once."""
    kept = [(n, s) for n, s in zip(t.shape, t.stride(), strict=True) if s or not n]
    return tuple(n for n, _ in kept), tuple(s for _, s in kept)


def results_of(value: Any) -> list[Any]:
    if not isinstance(value, tuple | list) or any(isinstance(v, tuple | list | dict) for v in value):
        raise Unsupported("its results are no plain sequence")
    return list(value)


def memory_of(ins: Sequence[Any], outs: Sequence[Any], written: list[int], env: dict[fx.Node, Any]) -> Memory:
    """Whose memory results lie in; env: the values of the graph's nodes, among which is what several results are views of."""
    owner = {storage(t): i for i, t in reversed(list(enumerate(ins))) if isinstance(t, torch.Tensor) and t.numel()}
    groups: dict[Any, list[int]] = {}
    for k, t in enumerate(outs):
        if isinstance(t, torch.Tensor):
            known = t.numel() or storage(t) in owner
            groups.setdefault(storage(t) if known else (id(t),), []).append(k)  # empty ones share nothing
    places: list[Place | None] = [None] * len(outs)
    made: list[int | fx.Node] = []
    for key, members in groups.items():
        whole = ins[owner[key]] if key in owner else outs[members[0]]
        if key not in owner:
            source: int | fx.Node = members[0]
            if any(outs[k] is not whole for k in members):  # views of one value: what covers the memory
                nodes = (
                    (n, v)
                    for n, v in env.items()
                    if n.op != "output" and isinstance(v, torch.Tensor) and not batched(v)
                )
                found = next(((n, v) for n, v in nodes if storage(v) == key and covers(v)), None)
                if found is None:
                    raise Unsupported("results share memory that no value covers")
                source, whole = found
            made.append(source)
        for k in members:
            t, number = outs[k], owner.get(key, len(made) - 1)
            if t.dtype != whole.dtype or t.is_conj() or t.is_neg():
                raise Unsupported("a result is a view of another dtype")
            itself = t is whole
            offset = t.storage_offset() - whole.storage_offset()
            places[k] = Place(key not in owner, number, None if itself else (tuple(t.shape), t.stride(), offset))
    return Memory(places, made, written)


batched = torch._C._functorch.is_functorch_wrapped_tensor  # inside of torch.vmap


def storage(t: torch.Tensor) -> int:
    return t.untyped_storage()._cdata


def covers(t: torch.Tensor) -> bool:
    """Whether a tensor is all of its memory, each element once."""
    return t.numel() * t.element_size() == t.untyped_storage().nbytes() and torch._debug_has_internal_overlap(t) == 0


def reason_for_torch(gm: fx.GraphModule, args: tuple, inputs: list[int], static: list[int]) -> str:
    tensors = [t for t in args if isinstance(t, torch.Tensor)]
    if any(True for _ in gm.parameters()):
        return "it calls modules that Dynamo did not inline"
    for node in gm.graph.nodes:
        if leaves_torch_as_is(node):
            continue
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            return f"it calls torch's operator {node.target.name()}, which takes graphs"
        place = getattr(node.target, "__module__", "") or ""
        functorch = place.startswith("torch._functorch") and not is_vmap(node)
        if place.startswith("torch.amp") or functorch:
            return f"it changes torch's state by {target_name(node.target)}"
    for t in tensors:
        if t.device.type != "cpu" or t.layout != torch.strided or type(t) not in (torch.Tensor, torch.nn.Parameter):
            return f"an input is a {type(t).__name__} on {t.device}"
    for i, t in enumerate(args):  # narrow parameters have memory that needle would share
        taken = {*TAKEN, *NARROW} if i in inputs else TAKEN
        if isinstance(t, torch.Tensor) and str(t.dtype)[6:] not in taken:
            return f"an input has dtype {t.dtype}"
    if torch.is_autocast_enabled("cpu"):
        return "autocast is on"
    if any(args[i].is_inference() for i in static):
        return "its parameters were made under inference_mode, so that changes cannot be seen"
    return ""


def is_vmap(node: fx.Node) -> bool:
    """Whether it is a part of torch.vmap, whose state ends with the graph."""
    return getattr(node.target, "__module__", "") == "torch._functorch.predispatch"


def leaves_torch_as_is(node: fx.Node) -> bool:
    """Whether it ends an autocast region or begins one, which changes nothing: it is off already, or another device's."""
    if node.target is torch.amp.autocast_mode._exit_autocast:
        node = node.args[0]  # type: ignore[assignment]
    elif node.target is not torch.amp.autocast_mode._enter_autocast:
        return False
    device, _, enabled, *_ = node.args
    return not enabled or device != "cpu"


def why(e: Exception) -> str:
    """One line; of a ConversionError the first call and why."""
    if isinstance(e, ConversionError):
        row = e.report.unsupported[0]
        return f"{row.op} at {row.location}: {row.reason}"
    text = reason_of(e)
    return text if isinstance(e, Unsupported | ValueError) else f"{type(e).__name__}: {text}"
