"""`compile_step`: forward, loss, gradients and the optimizer's update as one plan over parameters that it writes in place."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from needle import _core
from needle.autograd import Op, Spec, Tensor, Unsupported, vjp
from needle.backend_ndarray import FLOATS, Device, NDArray, full
from needle.backend_ndarray.forks import RUNS, fork_lock
from needle.backend_ndarray.kernels import attributes
from needle.backend_selection import BACKEND
from needle.graph import CountedRows, Graph, Recorder, Symbol, map_structure, trace
from needle.interop import mirror
from needle.nn.module import STRUCTURE, Module
from needle.op import kind_of

from .arguments import names, without_torch
from .compiled import evaluated
from .constants import taken_back
from .effects import Update, Write, changes
from .executable import CompiledPlan, Plans, entered
from .recompute import recomputed
from .rows import narrowed
from .settings import Choice
from .sharing import Bucket, Sharing
from .split import SplitPlan, is_foreign
from .tuner import step_times


class Objective(Module):
    """loss(net(x), *targets) as a module."""

    def __init__(self, net: Module, loss: Callable) -> None:
        super().__init__()
        self.net, self.loss = net, loss

    def forward(self, args: tuple, kwargs: dict, *targets: Any) -> Any:
        return self.loss(self.net(*args, **kwargs), *targets)


class Settings(NamedTuple):
    """What a step does with gradients. shares: of how many processes' gradients the mean is taken."""

    clip_grad_norm: float | None = None
    clip_grad_value: float | None = None
    accumulate: int = 1
    detect_anomaly: bool = False
    shares: int = 1
    recompute: str = "auto"


RECOMPUTE = ("auto", "none", "full")
APPLY = -1  # the turn that updates parameters by accumulated gradients


class StepPlan(CompiledPlan):
    """One step, or one of those whose gradients are accumulated: number `turn` of `settings.accumulate`, or APPLY.

    sums: the accumulated gradients. `updates` are the optimizer's, at `places` of the plan; `draws` make random inputs;
    `checks` are ops with what they have to look at: the number of an input, else a Spec; `recomputed` ops run twice.
    `buckets`: of gradients that are summed over processes, each from step `leaves` of the plan on.
    """

    core: Any
    boundary: int  # nodes of the graph up to the loss; behind are the gradients
    updates: list[Update]

    def __init__(
        self, step: TrainingStep, turn: int, specs: Any, inputs: list[NDArray], device: Device, recomputes: bool
    ) -> None:
        self.optimizer, self.settings, self.turn, self.sums = step.optimizer, step.settings, turn, step._sums
        self.recomputes, self.recomputed = recomputes, 0
        self.sharing, self.buckets = step._sharing, list[Bucket]()
        super().__init__(step.model, specs, step._pool, step._choice, inputs, device)
        if isinstance(self.info, SplitPlan):
            found = next(n for n in self.info.graph if is_foreign(n))
            dtype = found.args[0].meta["spec"].dtype if found.args else "these inputs"
            raise Unsupported(f"[compile_step] {found.target.label} has no kernel for {dtype} here; train it eagerly.")
        graph = self._rewritten[0]
        given = {n: i for i, n in enumerate(graph.inputs)}
        checking = [n for n in graph if n.kind == "op" and type(n.target).check_values is not Op.check_values]
        self.checks = [(n.target, [given.get(a, a.meta["spec"]) for a in n.args]) for n in checking]
        place = {label: i for i, label in enumerate(self.info.labels)}
        self.places = [place.get(u.label) for u in self.updates]  # None: a parameter of no elements
        written = {id(e.tensor): place.get(e.label, -1) + 1 for e, _ in self.effects if isinstance(e, Write)}
        final = [max(written[id(t)] for t in b.sums.values()) for b in self.buckets]
        self.leaves = list(itertools.accumulate(final, max))  # in one order in all processes

    def traced(self, fn: Callable, example: Any) -> Graph:
        recorder = Recorder(static=True, device=self.device, trains=True)
        self.effects, self.draws = recorder.effects, recorder.draws
        graph = trace(lambda *inputs: self._record(fn, inputs, recorder), *example, recorder=recorder)
        self.updates = [e for e, _ in self.effects if isinstance(e, Update)]
        written = [e.tensor for e, _ in self.effects if isinstance(e, Write)]
        trained = [p for p in self.optimizer.params if p.requires_grad]
        changes(graph, (*written, *trained, *self.sums.values()))
        graph = self.apart(graph)
        if self.recomputes and self.turn != APPLY:
            graph, self.recomputed = recomputed(graph, self.boundary)
        return graph

    def _record(self, fn: Callable, inputs: Any, recorder: Recorder) -> Any:
        """The loss, as `fn` gives it, and what the step does beside it, in `effects`."""
        if self.turn == APPLY:
            self._update(clipped({p: recorder.param(t) for p, t in self.sums.items()}, self.settings), recorder)
            return ()
        recorder.rows = rows = CountedRows(recorder)
        value = fn(*inputs)
        rows.end(value)
        value = narrowed(value, recorder)
        loss = first_leaf(value)
        self.boundary = len(recorder.graph.nodes)
        writes = recorder.pop_writes()  # from here on parameters are what they were before
        parameters = list(dict.fromkeys(p for p in self.optimizer.params if p.requires_grad))
        symbols = [recorder.param(p) for p in parameters]
        share = 1.0 / (self.settings.accumulate * self.settings.shares)
        seed = Tensor.make_const(full(loss.shape, share, loss.dtype, self.device))
        found = dict(zip(parameters, vjp(loss, seed, symbols), strict=True))
        value = map_structure(value, recorder.to_node)
        for tensor, moved in writes:  # the optimizer steps from what the forward wrote
            self.effects.append((Write(tensor, early=found.get(tensor) is not None), moved))
        self._accumulate({p: g for p, g in found.items() if g is not None}, recorder)
        return self.beside(value, recorder)

    def _accumulate(self, gradients: dict[Tensor, Any], recorder: Recorder) -> None:
        gradients = {p: g if g.dtype == p.dtype else g.astype(p.dtype) for p, g in gradients.items()}
        last = self.turn + 1 == self.settings.accumulate
        if self.sharing is not None:
            found = self.sharing.buckets(tuple(p.requires_grad for p in self.optimizer.params), list(gradients))
            self.sums = {p: t for b in found for p, t in b.sums.items()}
            self.buckets = found if last else []
        if self.turn > 0:
            gradients = {p: recorder.param(self.sums[p]) + g if p in self.sums else g for p, g in gradients.items()}
        if not last or self.sharing is not None:
            for i, (p, g) in enumerate(gradients.items()):
                if p not in self.sums:
                    self.sums[p] = Tensor.make_const(full(tuple(p.shape), 0.0, p.dtype, self.device))
                self.effects.append((Write(self.sums[p], f"gradient{i}", early=True), g))
            return
        self._update(clipped(gradients, self.settings), recorder)

    def _update(self, gradients: dict[Tensor, Any], recorder: Recorder) -> None:
        turns: dict[Tensor, int] = {}
        rows: list[tuple[int, Update, Any]] = []
        for number, group in enumerate(self.optimizer.param_groups):
            for p in group["params"]:
                if p not in gradients:
                    continue
                if not p.cached_data.is_compact():
                    p.data = Tensor.make_const(p.cached_data.compact())  # kernels write contiguous memory
                gradient = gradients[p] * -1 if group.data.get("maximize") else gradients[p]
                held = self.optimizer.state.get(p, {})
                data, slots = p.cached_data, self.optimizer.slots_for(group, tuple(p.shape))
                shapes = {s: self.optimizer.slot_shape(s, tuple(p.shape)) for s in slots}
                # Until the first step makes its state.
                room = partial(NDArray.empty, dtype=data.dtype, device=data.device)
                arrays = {s: held[s] if s in held else room(shapes[s]) for s in slots}
                turn = turns[p] = turns.get(p, -1) + 1
                label = f"update{len(rows)}"
                made = {s: Tensor.make_const(a) for s, a in arrays.items()}
                rows.append((turn, Update(self.optimizer, number, p, made, label), gradient))
        for _, update, gradient in sorted(rows, key=lambda row: row[0]):
            self.effects.append((update, gradient))
            if self.optimizer.composed:
                self.effects += self._moved(update, gradient, recorder)

    def _moved(self, update: Update, gradient: Any, recorder: Recorder) -> list[tuple[Write, Any]]:
        """What an optimizer that steps by ops writes: the parameter and its state arrays."""
        opt, p, group = self.optimizer, update.parameter, self.optimizer.param_groups[update.group]
        first = {"step": 1}  # of a profile before the first step
        rates = recorder.draw(
            Spec((len(opt.names),), p.dtype), lambda: np.asarray(opt.rates(group, p, opt.state.get(p, first)), p.dtype)
        )
        held = {slot: recorder.param(t) for slot, t in update.arrays.items()}
        named = {name: rates[i] for i, name in enumerate(opt.names)}
        value, moved = opt.update(group, recorder.param(p), gradient, held, named)
        written = {p: value} | {update.arrays[slot]: made for slot, made in moved.items()}
        return [(Write(t, f"{update.label}.{i}"), made) for i, (t, made) in enumerate(written.items())]

    def find_anomaly(self, arrays: Sequence[NDArray]) -> None:
        """Raise FloatingPointError for the first op of a step on these inputs that makes a NaN of numbers; slow."""
        graph, origins = self._rewritten[0], self.origins
        for node, given, value in evaluated(graph, arrays):
            if node.kind == "op" and has_nan(value) and not any(map(has_nan, given)):
                path = origins[node.name].path if node.name in origins else ""
                where = f" of {path}" if path else ""
                raise FloatingPointError(
                    f"[compile_step] {node.target.label}{where} ({node.name}) makes NaN of numbers; nothing was updated."
                )

    def check(self, arrays: Sequence[NDArray]) -> None:
        """Raise for inputs with values that the graph's ops cannot take, such as labels that are no class."""
        for op, operands in self.checks:
            op.check_values(*(arrays[a] if isinstance(a, int) else a for a in operands))

    def drawn(self) -> list[NDArray]:
        """The random numbers of one run."""
        made = [np.asarray(make()) for make in self.draws]
        return [NDArray(m, device=self.device, dtype=str(m.dtype)) for m in made]

    def begin(self) -> bool:
        """Count the step and hand its options to the plan; whether the optimizer's state is in other memory than before."""
        moved, options = False, {}
        opt = self.optimizer
        for update, place in zip(self.updates, self.places, strict=True):
            group = opt.param_groups[update.group]
            held, first = opt.advance(group, update.parameter, tuple(update.arrays))
            for slot, tensor in update.arrays.items():
                if tensor.cached_data is not held[slot]:
                    tensor.cached_data, moved = held[slot], True
            if place is None:
                continue
            key = (update.group, held["step"], first, *(held[n] for n in opt.numbers))
            if key not in options:
                name, attrs = opt.kernel(group, *key[1:])
                options[key] = attributes(name, **attrs)
            self.core.set_attributes(place, options[key])
        opt.t += bool(self.updates)
        return moved


def memory_of(device: Device) -> int:
    """Bytes that the device has, 0 where that is unknown."""
    return int(device.core.properties()["memory"])


def has_nan(value: Any) -> bool:
    parts = value if isinstance(value, tuple) else (value,)
    return any(a.dtype in FLOATS and bool(np.isnan(a.numpy()).any()) for a in parts)


def clipped(gradients: dict[Tensor, Any], settings: Settings) -> dict[Tensor, Any]:
    """Gradients within the limits, as `needle.optim.clip_grad_norm` and `clip_grad_value` leave them."""
    if settings.clip_grad_norm is not None and gradients:
        squares = [g.square_sum() for g in gradients.values()]
        total = sum(squares[1:], squares[0]) ** 0.5
        scale = (settings.clip_grad_norm / (total + 1e-6)).clamp(None, 1.0)
        gradients = {p: g * scale.astype(g.dtype) for p, g in gradients.items()}
    if (limit := settings.clip_grad_value) is not None:
        gradients = {p: g.clamp(-limit, limit) for p, g in gradients.items()}
    return gradients


def first_leaf(value: Any) -> Any:
    """The tensor that a step differentiates: the first of what the loss returned."""
    leaves: list[Any] = []
    map_structure(value, leaves.append)
    loss = leaves[0] if leaves else None
    if not isinstance(loss, Symbol):
        raise TypeError(
            f"[compile_step] the loss expects to return a tensor of the model's output, got {type(loss).__name__}."
        )
    if loss.shape not in ((), (1,)) or loss.dtype not in FLOATS:
        raise ValueError(f"[compile_step] the loss expects to be one float, got {loss.dtype} {loss.shape}.")
    if not loss.requires_grad:
        raise ValueError("[compile_step] the loss expects to depend on parameters that need a gradient, got none.")
    return loss


class TrainingStep(Plans):
    """A training step, `value = step(x, *targets)`: loss(net(x), *targets) in the caller's kind of arrays, after which
    parameters, running statistics and the optimizer's state are those of the next step.

    x: the model's input, a tuple of inputs, or a dict of them by name; targets: what the loss takes beside the output, arrays
    or not.
    Every shape has a plan of its own. `plan`, `report`, `memory`: of the last used one. Parameters' `.grad` stays as it is.
    """

    model: Objective
    kind = "a TrainingStep"

    def __init__(self, net: Module, loss: Callable, optimizer: Any, choice: Choice, settings: Settings) -> None:
        super().__init__(Objective(net, loss), choice)
        self.net, self.loss, self.optimizer, self.settings = net, loss, optimizer, settings
        self._turn, self._sums = 0, dict[Tensor, Tensor]()
        self._sharing: Sharing | None = None
        self._running = fork_lock(RUNS)
        known = {id(t) for _, t in self.model.named_tensors()}
        foreign = sum(id(p) not in known for p in optimizer.params)
        if foreign:
            raise ValueError(
                f"[compile_step] the optimizer expects parameters of the model, got {foreign} that are not."
            )

    @property
    def name(self) -> str:
        """The class of the net."""
        return type(self.net).__name__

    def export(self, path: Any, *args: Any, **kwargs: Any) -> None:
        """Refused: what a file holds changes nothing."""
        raise Unsupported("[export] expects an executable of inference, got a training step.")

    def _prepare(self, x: Any, *targets: Any) -> tuple[StepPlan, list[NDArray], str]:
        if not self._watch.lists_hold():
            STRUCTURE.changed()
        args, kwargs = (x, {}) if isinstance(x, tuple) else ((), x) if isinstance(x, dict) else ((x,), {})
        specs, arrays, kind = entered((args, kwargs, *targets))
        return self._plan(specs, arrays, self._turn), arrays, kind

    def _plan(self, specs: Any, arrays: list[NDArray], turn: int) -> StepPlan:
        opt = self.optimizer
        groups = tuple(opt.structure(g) for g in opt.param_groups)
        key = (repr(specs), turn, groups, tuple(p.requires_grad for p in opt.params))
        plan = self._plan_for(key, specs, arrays)
        assert isinstance(plan, StepPlan)
        return plan

    def share(self, reduce: Callable[[NDArray], Callable[[], Any]], count: int, nbytes: int) -> None:
        """From now on parameters move by the mean of the gradients of `count` processes, in buckets of `nbytes`.

        `reduce(flat)` begins to sum up a bucket in place and returns what waits for it. Statistics stay each process's own.
        """
        with self._running, self._planning, self._lock:
            self.settings = self.settings._replace(shares=count)
            self._sharing = Sharing(reduce, nbytes) if count > 1 else None
            self._turn, self._sums = 0, {}
            self._forget()

    def _make(self, key: Any, specs: tuple, inputs: list[NDArray], device: Device) -> CompiledPlan:
        make = partial(StepPlan, self, key[1], specs, inputs, device)
        plan = make(self.settings.recompute == "full")
        is_large = 0 < memory_of(device) // 2 < plan.info.arena_bytes
        return make(True) if self.settings.recompute == "auto" and is_large else plan

    def __call__(self, x: Any, *targets: Any) -> Any:
        with self._running:
            plan, arrays, kind = self._prepare(x, *targets)
            if self._sharing is not None:
                self._check_sums(self._sharing, plan)
            results = self._run(plan, arrays)
            self._turn = (self._turn + 1) % self.settings.accumulate
            if self._sharing is not None and plan.buckets:
                self._run(self._plan((), [], APPLY), [])
                self._sharing.done()
        return plan.outputs([mirror(NDArray.wrap(r, plan.device), kind) for r in results])

    def _check_sums(self, sharing: Sharing, plan: StepPlan) -> None:
        """Raise where this step's gradients do not belong to those so far; else they do from now on."""
        sharing.check()
        if self._turn and [*map(id, plan.sums.values())] != [*map(id, self._sums.values())]:
            raise RuntimeError(
                "[compile_step] accumulated gradients expect the same parameters to need one until they are applied, "
                f"got {len(self._sums)} and {len(plan.sums)}."
            )
        self._sums = plan.sums

    def profile(self, x: Any, *targets: Any, rounds: int = 10) -> list[tuple[str, str, float]]:
        """(kernel, node, median seconds) for every step of the plan; what the runs train is taken back."""
        with self._running:
            plan, arrays, _ = self._prepare(x, *targets)
            arrays = [*arrays, *plan.drawn()]
            with taken_back(self._pool):
                times = step_times(plan.info, arrays, rounds)
            self._epoch = _core.epoch()
        return list(zip(plan.info.names, plan.info.labels, times, strict=True))

    def _run(self, plan: StepPlan, arrays: list[NDArray]) -> Any:
        """One run with its random numbers; what the optimizer counted is taken back where it did not come to its end."""
        opt, before = self.optimizer, plan.core.runs
        held = {u.parameter: dict(opt.state[u.parameter]) for u in plan.updates if u.parameter in opt.state}
        t = opt.t
        try:
            plan.check(arrays)
            if plan.begin():
                self._pool.refresh()
                for info in plan.infos:
                    info.refresh()
            arrays = [*arrays, *plan.drawn()]
            plan.check_inputs(arrays)
            if self.settings.detect_anomaly:
                plan.find_anomaly(arrays)
            refs = [a._ref for a in arrays]
            results = plan.sharing.run(plan, refs) if plan.sharing and plan.buckets else plan.core.run_new(refs)
        except BaseException:
            if plan.core.runs == before:
                opt.t = t
                for u in plan.updates:
                    opt.state.pop(u.parameter, None)
                opt.state |= held
            raise
        self._epoch = _core.epoch()  # what the run wrote is no news to it
        return results


def compile_step(
    net: Module,
    loss: Callable,
    optimizer: Any,
    example: Any,
    *,
    clip_grad_norm: float | None = None,
    clip_grad_value: float | None = None,
    accumulate: int = 1,
    recompute: str = "auto",
    detect_anomaly: bool = False,
    precision: str = "float32",
    winograd: str = "auto",
    disable: Sequence[str] = (),
) -> TrainingStep:
    """A training step `step(x, *targets)` of `net` by `optimizer`, planned for the shapes of `example`, a tuple (x, *targets).

    Most have one target, `step(x, y)`; a model that computes its loss itself has none. A step computes loss(net(x), *targets),
    its gradients, and the optimizer's update of the parameters that need a gradient, and returns what the loss returned: one
    float, or a structure whose first leaf is that. Other shapes, as of a last batch, get a plan of their own on first use.
    Everything that trains is written in place: `net`, executables of it, `state_dict` and checkpoints have the trained values at
    once; options of the optimizer, such as a schedule's rate, hold from the next step on. Modes are as they are: call
    `net.train()` first. Random numbers (dropout) come from numpy's global stream in the order of eager steps, so that both agree.

    clip_grad_norm: the largest norm of all gradients together; clip_grad_value: of every entry, after that.
    accumulate: parameters move in every such call, by the mean of the gradients of the calls since they last did.
    recompute: "full" keeps some of the forward pass in memory and computes the rest a second time for the gradients, "none" keeps
        all, "auto" all unless the plan's arena would take more than half of the device's memory. See `step.memory`.
    detect_anomaly: run every op by itself first and raise FloatingPointError for the one that makes NaN; slow.
    precision, winograd, disable: as of `compile`; a precision holds for the gradients' products, too.
    """
    if BACKEND == "np":
        raise RuntimeError("[compile_step] the numpy backend has no executor; use NEEDLE_BACKEND=nd.")
    if not isinstance(net, Module):
        raise TypeError(f"[compile_step] net expects a needle Module, got {kind_of(net)}.")
    if not callable(loss) or isinstance(loss, type):
        raise TypeError(f"[compile_step] loss expects a function of the output and the targets, got {kind_of(loss)}.")
    if not hasattr(optimizer, "param_groups") or not hasattr(optimizer, "kernel"):
        raise TypeError(f"[compile_step] optimizer expects one of needle.optim, got {kind_of(optimizer)}.")
    if not isinstance(example, tuple | list) or not example:
        raise TypeError(f"[compile_step] example expects a tuple (x, *targets), got {kind_of(example)}.")
    for name, limit in (("clip_grad_norm", clip_grad_norm), ("clip_grad_value", clip_grad_value)):
        if limit is not None and not (isinstance(limit, int | float) and limit > 0):
            raise ValueError(f"[compile_step] {name} expects a number above 0, got {limit!r}.")
    if type(accumulate) is not int or accumulate < 1:
        raise ValueError(f"[compile_step] accumulate expects a number of steps of at least 1, got {accumulate!r}.")
    choice = Choice(winograd=winograd, precision=precision, disable=names("disable", disable))
    if recompute not in RECOMPUTE:
        raise ValueError(f"[compile_step] recompute expects one of {', '.join(RECOMPUTE)}, got {recompute!r}.")
    settings = Settings(clip_grad_norm, clip_grad_value, accumulate, detect_anomaly, recompute=recompute)
    step = TrainingStep(net, loss, optimizer, choice, settings)
    with without_torch("compile_step"):
        step._prepare(*example)
    return step
