"""What all optimizers share. They write parameters in place, keep their state outside the tape and never change gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np

from needle.autograd import Tensor
from needle.backend_ndarray import NDArray, full
from needle.backend_ndarray.kernels import call_groups
from needle.nn.module import reset_gradients

from .clip import clip_grad_norm
from .group import BETAS, Group, as_groups, once, rule_of
from .torch_state import from_torch


def option(name: str) -> property:
    """An option as the optimizer's attribute: what all groups have; setting it sets it in all of them."""

    def get(self: Optimizer) -> Any:
        label, groups = type(self).__name__, self.param_groups
        if name not in (*groups[0].data, *BETAS):
            raise AttributeError(f"[{label}] rule {self.rule} has no option {name}.")
        if any(g[name] != groups[0][name] for g in groups):
            raise ValueError(f"[{label}] the groups differ in {name}: read param_groups.")
        return groups[0][name]

    def put(self: Optimizer, value: Any) -> None:
        for group in self.param_groups:
            group[name] = value

    return property(get, put)


class Optimizer:
    """Base: `param_groups`, `params`, `reset_grad`, `step`. State arrays are made when a parameter's step first needs them.

    params: a list of parameters, `named_parameters()`, or dicts {"params": [...], option: value} whose options go before the
        optimizer's own.
    rule: "torch" or "needle" (the course's); None: what the parameters ask for, torch's those of converted models.
    Options are the rule's own, by its names, and torch's `betas` or the course's `beta1` and `beta2` alike.

    A subclass names its options, arguments and state arrays (`slots`) and defines `kernel` and `formula`.
    """

    rules: ClassVar[Mapping[str, Mapping[str, Any]]] = {"needle": {"lr": 0.01}, "torch": {"lr": 0.001}}  # with defaults
    arguments: ClassVar[Mapping[str, tuple[str, ...]]] = {"needle": ("lr",), "torch": ("lr",)}  # given by position
    slots: ClassVar[tuple[str, ...]] = ()
    required: ClassVar[tuple[str, ...]] = ()  # those that a stepped parameter always has
    numbers: ClassVar[tuple[str, ...]] = ()  # of a parameter's state, beside "step": they go to `kernel`, too
    composed: ClassVar[bool] = False  # steps by ops, see composed.py
    torch_names: ClassVar[Mapping[str, str]] = {}  # of a parameter's state in torch's optimizer of this name, by ours
    lr = option("lr")

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for name in dict.fromkeys(n for options in cls.rules.values() for n in options):
            for attribute in BETAS if name == "betas" else (name,):
                if attribute not in cls.__dict__:
                    setattr(cls, attribute, option(attribute))

    def __init__(self, params: Any, *args: Any, rule: str | None = None, **options: Any) -> None:
        label = type(self).__name__
        groups = as_groups(label, params)
        if rule not in (None, *self.rules):
            raise ValueError(f"[{label}] rule expects needle or torch, got {rule}.")
        self.rule = rule or rule_of(label, [p for g in groups for p in g["params"]])
        self.mixes = rule is not None  # takes parameters of both kinds
        names = self.arguments[self.rule]
        if len(args) > len(names):
            raise TypeError(
                f"[{label}] rule {self.rule} takes {', '.join(names)} by position and the rest by name, got {len(args)} values."
            )
        twice = [name for name, _ in zip(names, args, strict=False) if name in options]
        if twice:
            raise TypeError(f"[{label}] {twice[0]} is given twice.")
        self.defaults = dict(zip(names, args, strict=False)) | options
        once(label, self.defaults)
        self.param_groups: list[Group] = []
        self.state: dict[Tensor, dict[str, Any]] = {}
        self.t = 0  # steps so far
        for group in groups:
            self.add_param_group(group)

    def add_param_group(self, group: Mapping[str, Any]) -> None:
        """Step these parameters, too: {"params": [...], option: value}; options that it lacks are the optimizer's."""
        label = type(self).__name__
        (given,) = as_groups(label, [group])
        once(label, given)
        held = {id(p) for p in self.params}
        if any(id(p) in held for p in given["params"]):
            raise ValueError(f"[{label}] expects a parameter in one group, got one in two.")
        if self.rule == "torch" and len({id(p) for p in given["params"]}) < len(given["params"]):
            raise ValueError(f"[{label}] expects a parameter once in a group, got one twice.")
        asked = rule_of(label, given["params"]) if given["params"] and not self.mixes else self.rule
        if asked != self.rule:
            raise ValueError(
                f"[{label}] steps by rule {self.rule}, got parameters of rule {asked}; say which by rule=."
            )
        made = Group(label, self.rule, self.rules, {**self.defaults, **given})
        self.check(made)
        self.param_groups.append(made)

    def check(self, group: Group) -> None:
        """Raise ValueError for options that do not go together."""

    @property
    def params(self) -> list[Any]:
        return [p for group in self.param_groups for p in group["params"]]

    def reset_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, or make them zeros."""
        reset_gradients(self.params, set_to_none)

    zero_grad = reset_grad

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the parameters that have a gradient. closure: called first, to compute gradients; what it gives is returned."""
        value = None if closure is None else closure()
        self._check_gradients()
        self.t += 1
        batches: dict[Any, list[tuple[Any, Any, list[Any]]]] = {}  # what one kernel call steps together
        turns: dict[int, int] = {}  # a parameter given twice is stepped twice, one time after the other
        for number, group in enumerate(self.param_groups):
            for p in group["params"]:
                gradient = p.grad
                if gradient is None:
                    continue
                data, grad = p.cached_data, gradient.realize_cached_data()
                if group.data.get("maximize"):
                    grad = np.negative(grad, out=np.empty_like(grad)) if isinstance(data, np.ndarray) else grad * -1
                slots = self.slots_for(group, tuple(p.shape))
                state, first = self.advance(group, p, slots)
                if self.step_alone(group, p, grad, state, first):
                    continue
                if not data.is_compact():
                    p.data = Tensor.make_const(data.compact())  # the kernels write contiguous memory
                    data = p.cached_data
                turn = turns[id(p)] = turns.get(id(p), -1) + 1
                numbers = tuple(state[name] for name in self.numbers)
                key = (turn, number, state["step"], first, numbers, data.dtype, data.device)
                batches.setdefault(key, []).append((p, grad.compact(), self.operands(data, state, slots)))
        for (_, number, step, first, numbers, *_), batch in batches.items():
            name, attrs = self.kernel(self.param_groups[number], step, first, *numbers)
            outs = [a for *_, operands in batch for a in operands]
            call_groups(name, outs, [grad for _, grad, _ in batch], **attrs)
            for p, *_ in batch:
                p.touch()
        return value

    def advance(self, group: Group, p: Tensor, slots: tuple[str, ...]) -> tuple[dict[str, Any], bool]:
        """Count a step of a parameter: its state, with the arrays that the step uses, and whether some of them are new."""
        state, data = self.state.setdefault(p, {"step": 0}), p.cached_data
        state["step"] += 1
        for slot in slots:
            if slot in state and place(state[slot]) != place(data):  # the model was moved or cast
                state[slot] = Tensor(state[slot], device=p.device, dtype=p.dtype).cached_data
        missing = [slot for slot in slots if slot not in state]
        for slot in missing:
            state[slot] = filled(self.slot_shape(slot, tuple(data.shape)), self.initial(slot, group), data)
        return state, bool(missing)

    def step_alone(self, group: Group, p: Tensor, grad: Any, state: dict[str, Any], first: bool) -> bool:
        """Step one parameter by itself, or say that a kernel steps it with others."""
        if isinstance(p.cached_data, np.ndarray):
            self.formula(group, p.cached_data, grad, state, first)
            return True
        return False

    def _check_gradients(self) -> None:
        for i, p in enumerate(self.params):
            g, label = p.grad, type(self).__name__
            if g is None:
                continue
            if not isinstance(g, Tensor):
                raise TypeError(f"[{label}] the gradient of parameter {i} expects a Tensor, got {type(g).__name__}.")
            if g.shape != p.shape or place(g.cached_data) != place(p.cached_data):
                what = next(w for w in ("shape", "dtype", "device") if getattr(g, w) != getattr(p, w))
                want, got = getattr(p, what), getattr(g, what)
                raise ValueError(f"[{label}] the gradient of parameter {i} expects {what} {want}, got {got}.")

    def slots_of(self, group: Group) -> tuple[str, ...]:
        """The state arrays that a step with these options uses."""
        return self.slots

    def slots_for(self, group: Group, shape: tuple[int, ...]) -> tuple[str, ...]:
        """Those of a parameter of this shape."""
        return self.slots_of(group)

    def slot_shape(self, slot: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a state array of a parameter of this shape."""
        return shape

    def initial(self, slot: str, group: Group) -> float:
        """What a new state array is filled with."""
        return 0.0

    def structure(self, group: Group) -> tuple[Any, ...]:
        """Options on which the plan of a step depends; it reads the others anew in every step."""
        return self.slots_of(group), group.data.get("maximize"), len(group["params"])

    def kernel(self, group: Group, step: int, first: bool) -> tuple[str, dict[str, Any]]:
        """The kernel that steps parameters on a device, and its attributes.

        step: how often they were stepped, this time included; first: some of their state arrays are new.
        """
        raise NotImplementedError(f"[{type(self).__name__}] defines no kernel.")

    def operands(self, data: Any, state: Mapping[str, Any], slots: tuple[str, ...]) -> list[Any]:
        """What the kernel writes for a parameter; it leaves alone what stands in for an array that is not used."""
        return [data, *(state[slot] if slot in slots else data for slot in self.slots)]

    def formula(self, group: Group, data: np.ndarray, grad: np.ndarray, state: Mapping[str, Any], first: bool) -> None:
        """The step in numpy, in place."""
        raise NotImplementedError(f"[{type(self).__name__}] defines no formula.")

    def clip_grad_norm(self, max_norm: float = 0.25, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> float:
        """See `needle.optim.clip_grad_norm`."""
        return clip_grad_norm(self.params, max_norm, norm_type, error_if_nonfinite)

    def __repr__(self) -> str:
        label, groups = type(self).__name__, self.param_groups
        if len(groups) == 1:
            return f"{label}(rule={self.rule!r}, {groups[0]!r}: {len(self.params)} parameters)"
        lines = [f"\n  group {i}: {g!r}: {len(g['params'])} parameters" for i, g in enumerate(groups)]
        return f"{label}(rule={self.rule!r}{''.join(lines)}\n)"

    # -- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Copies: {"kind", "rule", "step", "options": {name: value}, "state": {parameter's place: {slot: numpy array}}}.

        A parameter's own number of steps is slot "step". Of several groups "options" is a list; "sizes": their lengths.
        """
        state = {
            i: {slot: np.array(a.numpy() if isinstance(a, NDArray) else a) for slot, a in self.state[p].items()}
            for i, p in enumerate(self.params)
            if p in self.state
        }
        options = [g.options() for g in self.param_groups]
        made = {"kind": type(self).__name__, "rule": self.rule, "step": self.t, "state": state}
        made["sizes"] = [len(g["params"]) for g in self.param_groups]
        return made | {"options": options[0] if len(options) == 1 else options}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what `state_dict` of an optimizer of the same kind and rule over parameters of the same shapes gave.

        That of torch's optimizer of the same name is taken, too.
        """
        if "param_groups" in state:
            state = from_torch(self, state)
        label, step = type(self).__name__, state["step"]
        if state["kind"] != label:
            raise ValueError(f"[{label}] the state expects to be of this optimizer, got {state['kind']}.")
        given = state["options"] if isinstance(state["options"], list) else [state["options"]]
        if not all(isinstance(g, Mapping) and "lr" in g for g in given):
            got = tuple(given[0]) if given and isinstance(given[0], Mapping) else given
            raise ValueError(f"[{label}] the state expects options {tuple(self.rules[self.rule])}, got {got}.")
        rule = state.get("rule", given[0].get("rule", self.rule) if given else self.rule)
        if rule != self.rule:
            raise ValueError(f"[{label}] the state expects rule {self.rule}, got {rule}.")
        own = [len(g["params"]) for g in self.param_groups]
        sizes = state.get("sizes", own)
        if sizes != own or len(given) != len(own):
            raise ValueError(f"[{label}] the state expects groups of {own} parameters, got {sizes}.")
        if type(step) is not int or step < 0:
            raise ValueError(f"[{label}] the state expects a number of steps, got {step!r}.")
        groups = [self._group(g, options) for g, options in zip(self.param_groups, given, strict=True)]
        params = self.params
        loaded = {int(i): self._arrays(int(i), arrays, step) for i, arrays in state["state"].items()}
        for group, read in zip(self.param_groups, groups, strict=True):
            group.data |= read.data
        self.state, self.t = {params[i]: arrays for i, arrays in loaded.items()}, step

    def _group(self, group: Group, options: Mapping[str, Any]) -> Group:
        """A group with loaded options; ValueError for what it does not take."""
        known = {name: value for name, value in options.items() if name != "rule"}  # where files once had it
        if self.rule == "needle":  # once saved, though of no meaning
            known = {k: v for k, v in known.items() if k not in ("dampening", "nesterov") or v}
        try:
            made = Group(group.label, self.rule, self.rules, {**known, "params": group["params"]})
            self.check(made)
        except TypeError as e:
            raise ValueError(str(e)) from None
        return made

    def _arrays(self, i: int, arrays: Mapping[str, np.ndarray], steps: int) -> dict[str, Any]:
        label = type(self).__name__
        if not 0 <= i < len(self.params):
            raise ValueError(f"[{label}] the state expects {len(self.params)} parameters, got number {i}.")
        names = set(arrays) - {"step", *self.numbers}
        if not {*self.required, *self.numbers} <= set(arrays) or not names <= set(self.slots):
            raise ValueError(f"[{label}] the state expects arrays {self.slots + self.numbers}, got {tuple(arrays)}.")
        p = self.params[i]
        for slot in arrays:
            want = self.slot_shape(slot, tuple(p.shape)) if slot in names else ()
            if tuple(arrays[slot].shape) != want:
                raise ValueError(f"[{label}] {slot} of parameter {i} expects shape {want}, got {arrays[slot].shape}.")
        made = {slot: Tensor(arrays[slot], device=p.device, dtype=p.dtype).cached_data for slot in sorted(names)}
        numbers = {name: float(arrays[name]) for name in self.numbers}
        return {"step": int(arrays.get("step", steps)), **numbers, **made}


def place(a: Any) -> tuple[Any, Any]:
    return a.dtype, None if isinstance(a, np.ndarray) else a.device


def filled(shape: tuple[int, ...], value: float, like: Any) -> Any:
    """An array of like's dtype and place."""
    is_numpy = isinstance(like, np.ndarray)
    return np.full(shape, value, like.dtype) if is_numpy else full(shape, value, like.dtype, like.device)
