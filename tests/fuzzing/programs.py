"""Small random programs of torch calls, from every conversion rule of a function: shapes, dtypes and values in every form.

torch in float32 says the dtype and the shape, torch in float64 the values; where they are discontinuous, programs whose
float results are shaken by some roundings say how much is unsure.
"""

from __future__ import annotations

import inspect
import random
import re
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import needle as ndl
import operator_fusion
import torch2needle
from torch2needle.registry import FUNCTION_RULES, is_inplace, is_overload, target_name
from torch2needle.report import ConversionError

from . import program_layers  # noqa: F401 - generators
from .frame import Wrong
from .program_arguments import DTYPES, State, arguments

NAME, SAMPLE, FULL, SECONDS = "programs", 1200, 200_000, 30
STEPS = 7  # at most
TOLERANCE = 1e-5  # relative to the largest value
SHAKE = 3e-7  # relative: some roundings of float32
# The results of these are not defined, or the order of equal elements is not.
UNDEFINED = ("empty", "new_empty", "empty_like", "cuda", "tensor", "scalar_tensor", "len", "half", "bfloat16")
ORDERED = ("sort", "argsort", "topk")


@lru_cache(1)
def targets() -> dict[str, tuple[Any, Callable]]:
    """Every torch function and method that has a rule, with it, by name."""
    found = {}
    for target, rule in FUNCTION_RULES.items():
        name = target_name(target)
        if isinstance(target, str) or is_overload(target) or name.startswith(("math.", "torch.sym_")):
            continue  # of export's captures, sizes and other libraries
        if name.rpartition(".")[2].rstrip("_") not in UNDEFINED and not name.endswith("_with_indices"):
            found[name] = (target, rule)
    return found


# -- data -------------------------------------------------------------------------------------------------------------------


def make(dtype: str, shape: tuple[int, ...], seed: int, kind: str) -> torch.Tensor:
    """Values of a kind, from a seed: eighths, of which most functions keep every digit."""
    rng = np.random.RandomState(seed)
    within = re.fullmatch(r"(below|within) (\d+)", kind)
    if within:
        n = int(within[2])
        values = rng.randint(0 if within[1] == "below" else -n, max(n, 1), shape)
    elif dtype == "bool":
        values = rng.randint(0, 2, shape)
    elif dtype.startswith("int"):
        values = rng.randint(-5, 6, shape)
        if kind == "special":
            values = rng.choice(
                [2**31 - 1, -(2**31), 0, 1] if dtype == "int32" else [2**53 + 1, 2**62, -(2**63), 2**63 - 1], shape
            )
    else:
        values = rng.randint(1 if kind == "positive" else -24, 25, shape) / 8
        if kind == "special":
            values = np.where(
                rng.rand(*shape) < 0.3, rng.choice([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e30, 1e-30], shape), values
            )
    x = torch.tensor(np.asarray(values), dtype=getattr(torch, dtype))
    if kind == "transposed" and x.ndim > 1:
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if kind == "strided" and x.ndim:
        return torch.stack([x, x], -1)[..., 0]
    return x


class Program(nn.Module):
    """The steps of a case; `shake` is applied to the result of every step."""

    def __init__(self, case: dict[str, Any], double: bool = False, shake: Callable[[Any], Any] = lambda v: v) -> None:
        super().__init__()
        self.case, self.double, self.shake = case, double, shake
        self.places: dict[Any, str] = {}
        for found in constants(case):
            name = f"c{len(self.places)}"
            self.places[found] = name
            self.register_buffer(name, self.real(make(*found[1:])))

    def real(self, x: torch.Tensor) -> torch.Tensor:
        return x.double() if self.double and x.dtype == torch.float32 else x

    def dtype(self, name: str) -> torch.dtype:
        return torch.float64 if self.double and name == "float32" else getattr(torch, name)

    def value(self, v: Any, known: list[Any]) -> Any:
        """An argument: plain data with values for references."""
        if isinstance(v, tuple) and v and v[0] in ("c", *READERS):
            return getattr(self, self.places[v]) if v[0] == "c" else READERS[v[0]](self, v, known)
        return tuple(self.value(i, known) for i in v) if isinstance(v, tuple) else v

    def run(self, *inputs: Any) -> Any:
        known = list(inputs)
        for name, args, kwargs in self.case["steps"]:
            known.append(self.shake(self.call(name, args, kwargs, known)))
        return tuple(known[i] for i in self.case["outputs"])

    def call(self, name: str, args: tuple, kwargs: dict[str, Any], known: list[Any]) -> Any:
        values = [self.value(a, known) for a in args]
        named = {k: self.value(v, known) for k, v in kwargs.items()}
        method = name.removeprefix("torch.Tensor.")
        if method != name and not method.startswith("__r"):
            return getattr(values[0], method)(*values[1:], **named)
        if method != name:
            return getattr(values[0], method)(*values[1:])
        return targets()[name][0](*values, **named)


READERS: dict[str, Callable[[Program, Any, list[Any]], Any]] = {
    "v": lambda p, v, known: known[v[1]] if len(v) == 2 else known[v[1]][v[2]],
    "dtype": lambda p, v, known: p.dtype(v[1]),
    "slice": lambda p, v, known: slice(*v[1:]),
    "...": lambda p, v, known: ...,
    "list": lambda p, v, known: [p.value(i, known) for i in v[1:]],
    "tuple": lambda p, v, known: tuple(p.value(i, known) for i in v[1:]),
    "size": lambda p, v, known: p.value(v[1], known).shape[v[2]],
}


class One(Program):
    def forward(self, a: Any) -> Any:
        return self.run(a)


class Two(Program):
    def forward(self, a: Any, b: Any) -> Any:
        return self.run(a, b)


class Three(Program):
    def forward(self, a: Any, b: Any, c: Any) -> Any:
        return self.run(a, b, c)


def program(case: dict[str, Any], **options: Any) -> Program:
    return (One, Two, Three)[len(case["inputs"]) - 1](case, **options).eval()


def constants(case: dict[str, Any]) -> list[Any]:
    found: dict[Any, None] = {}

    def visit(v: Any) -> None:
        if isinstance(v, tuple | list):
            if v and v[0] == "c":
                found[v] = None
            for i in v if not (v and v[0] == "c") else ():
                visit(i)

    for _, args, kwargs in case["steps"]:
        visit(args), visit(tuple(kwargs.values()))
    return list(found)


# -- drawing ----------------------------------------------------------------------------------------------------------------


def draw(rng: random.Random) -> dict[str, Any]:
    """Inputs, steps that torch takes (of which the last may be one that it refuses), outputs and the forms to check."""
    s = State(rng, make)
    kinds = ("plain", "plain", "plain", "plain", "transposed", "strided", "special")
    case: dict[str, Any] = {"inputs": [], "steps": [], "outputs": []}
    base = s.shape()
    for _ in range(rng.randint(1, 3)):
        shape = base if s.chance(0.5) else s.shape()
        case["inputs"].append((s.dtype(), shape, rng.randrange(1000), rng.choice(kinds)))
    s.values = [make(*i) for i in case["inputs"]]
    names = sorted(targets())
    for _ in range(rng.randint(1, STEPS)):
        for _ in range(6):
            step = drawn_step(s, case, rng.choice(names))
            if step is not None:
                break
    results = list(range(len(case["inputs"]), len(s.values)))
    case["outputs"] = sorted({*results[-1:], *(i for i in results if s.chance(0.4))}) or [0]
    case["form"] = rng.choice(("fused", "saved", "numpy", "free", "without an example", "wider"))
    if s.chance(0.02):
        case["form"] = "export"
    return case


def drawn_step(s: State, case: dict[str, Any], name: str) -> Any:
    """Adds a step of this name that torch takes, or returns None."""
    target, rule = targets()[name]
    made = arguments(s, rule, name)
    if made is None or (made[0] and made[0][0] == "unfit"):
        return None
    step = (name, *made)
    trial = {**case, "steps": [*case["steps"], step], "outputs": []}
    try:
        values = [v.clone() if isinstance(v, torch.Tensor) else v for v in s.values]
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = program(trial).call(*step, values)
    except Exception:
        return None
    if too_large(result) or (name.rpartition(".")[2] in ORDERED and has_ties(result)) or not defined(name, made, s):
        return None
    case["steps"].append(step)
    if is_inplace(target):
        s.values = run_all(case)  # other values may share the memory
    else:
        s.values.append(result)
    return step


def run_all(case: dict[str, Any]) -> list[Any]:
    every = range(len(case["inputs"]) + len(case["steps"]))
    with torch.no_grad():
        return list(program({**case, "outputs": every})(*(make(*i).clone() for i in case["inputs"])))


def tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for v in value:
            yield from tensors(v)


def too_large(result: Any) -> bool:
    return any(t.numel() > 4000 or str(t.dtype)[6:] not in (*DTYPES, "float16", "bfloat16") for t in tensors(result))


def has_ties(result: Any) -> bool:
    """Whether equal elements leave the order open; argsort does not show them."""
    return not isinstance(result, tuple) or any(len(set(v.flatten().tolist())) < v.numel() for v in result[:1])


def defined(name: str, made: Any, s: State) -> bool:
    """False for a cast of a float that the integer cannot hold: C++ and processors differ there."""
    found = [v for v in tensors(tuple(s.values)) if v.is_floating_point()]
    large = any(bool(((v.abs() >= 2**31) | v.isnan()).any()) for v in found)
    return not large or "int" not in repr(made) + name.replace("long", "int").replace("copy", "int")


# -- judging ----------------------------------------------------------------------------------------------------------------


def outputs(value: Any) -> list[Any]:
    """Arrays and numbers of a result, in order."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, tuple | list):
        return [o for v in value for o in outputs(v)]
    return [value]


def array(value: Any) -> np.ndarray:
    if isinstance(value, torch.Tensor):
        value = value.detach().float() if value.dtype in (torch.float16, torch.bfloat16) else value.detach()
    return np.asarray(value.numpy() if hasattr(value, "numpy") else value)


class Judge:
    """torch's results of a case on some inputs."""

    def __init__(self, case: dict[str, Any], inputs: list[torch.Tensor]) -> None:
        self.case, self.inputs = case, inputs
        self.want = [array(o) for o in outputs(self.run(program(case)))]
        self.exact: list[np.ndarray] | None = None

    def run(self, model: Program) -> Any:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.set_default_dtype(torch.float64 if model.double else torch.float32)
            try:
                return model(*(model.real(i.clone()) for i in self.inputs))
            finally:
                torch.set_default_dtype(torch.float32)

    def check(self, form: str, got: Any) -> None:
        arrays = [array(o) for o in outputs(got)]
        if len(arrays) != len(self.want):
            raise Wrong(f"{form}: {len(arrays)} outputs, torch has {len(self.want)}")
        for i, (mine, theirs) in enumerate(zip(arrays, self.want, strict=True)):
            if mine.shape != theirs.shape:
                raise Wrong(f"{form}: output {i} has shape {mine.shape}, torch {theirs.shape}")
            if mine.dtype != theirs.dtype:
                raise Wrong(f"{form}: output {i} has dtype {mine.dtype}, torch {theirs.dtype}")
            if not np.array_equal(mine, theirs, equal_nan=mine.dtype.kind == "f"):
                self.compare(form, i, mine)

    def compare(self, form: str, i: int, mine: np.ndarray) -> None:
        if self.exact is None:
            self.settle()
        assert self.exact is not None
        want, unsure, theirs = self.exact[i].astype("float64"), self.unsure[i], self.want[i].astype("float64")
        mine = mine.astype("float64")
        with np.errstate(all="ignore"):
            finite = np.isfinite(want)
            scale = np.abs(want[finite]).max(initial=0.0)
            room = (
                TOLERANCE * scale
                + unsure
                + 4 * np.abs(np.where(finite & np.isfinite(theirs), theirs - want, 0))
                + 1e-30
            )
            agree = np.abs(mine - want) <= room
        agree |= (
            (mine == theirs) | (np.isnan(mine) & np.isnan(theirs)) | (mine == want) | (np.isnan(mine) & np.isnan(want))
        )
        agree |= np.isnan(unsure)
        if not agree.all():
            at = tuple(int(k) for k in np.argwhere(~agree)[0])
            raise Wrong(f"{form}: output {i} is {mine[at]!r} at {at}, torch has {theirs[at]!r}")

    def settle(self) -> None:
        """Results in float64, and how far some roundings move them: nan where they turn them over."""
        self.exact = [array(o) for o in outputs(self.run(program(self.case, double=True)))]
        self.unsure = [np.zeros(e.shape) for e in self.exact]
        for how in (1, -1, 0):
            with np.errstate(all="ignore"):
                shaken = [array(o) for o in outputs(self.run(program(self.case, double=True, shake=shaker(how))))]
                for k, (e, m) in enumerate(zip(self.exact, shaken, strict=True)):
                    away = np.abs(e.astype("float64") - m.astype("float64"))
                    if e.dtype.kind != "f":
                        away = np.where(away > 0, np.nan, 0.0)
                    away = np.where((e == m) | (np.isnan(e) & np.isnan(m)), 0.0, away) if e.dtype.kind == "f" else away
                    self.unsure[k] = self.unsure[k] + 8 * away


def shaker(how: int) -> Callable[[Any], Any]:
    rng = torch.Generator().manual_seed(7)

    def shake(v: Any) -> Any:
        if isinstance(v, tuple | list):
            return type(v)(map(shake, v)) if type(v) in (tuple, list) else type(v)([shake(i) for i in v])
        if not isinstance(v, torch.Tensor) or not v.is_floating_point():
            return v
        noise = torch.full_like(v, how) if how else torch.randn(v.shape, generator=rng, dtype=v.dtype)
        v.copy_(v * (1 + SHAKE * noise)) if v.numel() and not overlapping(v) else None
        return v

    return shake


def overlapping(v: torch.Tensor) -> bool:
    return any(s == 0 and n > 1 for s, n in zip(v.stride(), v.shape, strict=True))


# -- checking ---------------------------------------------------------------------------------------------------------------

SENTENCE = re.compile(r"\[[\w .()/-]+\] .+\.$", re.DOTALL)
REFUSALS = (
    ConversionError,
    ndl.autograd.Unsupported,
    ValueError,
    TypeError,
    IndexError,
    ndl.backend_ndarray.NoKernel,
    NotImplementedError,
)


class Refused(Exception):
    pass


def tried(form: str, f: Callable[[], Any]) -> Any:
    """f(), or Refused where it refuses in a sentence; any other failure is Wrong."""
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return f()
    except ConversionError as e:
        reasons = [r.reason for r in e.report.unsupported]
        bad = [r for r in reasons if re.match(r"[A-Z]\w*(Error|Exception|Warning)\b:", r)]
        if bad:
            raise Wrong(f"{form}: {bad[0]}") from None
        raise Refused(f"refused: {reasons[0] if reasons else e}") from None
    except Exception as e:
        text = " ".join(str(e).split())
        if isinstance(e, REFUSALS) and SENTENCE.match(text):
            raise Refused(f"refused, {form}: {text}") from None
        raise Wrong(f"{form}: {type(e).__name__}: {text[:300]}") from None


def check(case: dict[str, Any]) -> str:
    inputs = [make(*i) for i in case["inputs"]]
    try:
        judge = Judge(case, inputs)
    except Wrong:
        raise
    except Exception:
        return "torch refuses"
    try:
        return checked(case, judge)
    except Refused as e:
        return str(e)


def fed(inputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return tuple(i.clone() if not overlapping(i) and i.is_contiguous() else i for i in inputs)


def checked(case: dict[str, Any], judge: Judge) -> str:
    inputs, form = judge.inputs, case["form"]
    model = program(case)
    if form == "export":
        exported = tried("export", lambda: torch.export.export(model, fed(inputs)))
        net = tried("export", lambda: torch2needle.convert(exported))
    else:
        example = None if form == "without an example" else fed(inputs)
        net = tried("convert", lambda: torch2needle.convert(model, example))
    how = {"export": "exported, eager", "without an example": "without an example, eager"}.get(form, "eager")
    judge.check(how, tried(how, lambda: net(*fed(inputs))))
    judge.check("compiled", tried("compiled", lambda: ndl.compile(net, fed(inputs))(*fed(inputs))))
    if form == "fused":
        fused = tried("fuse", lambda: operator_fusion.fuse(net))
        judge.check("fused", tried("fused", lambda: ndl.compile(fused, fed(inputs))(*fed(inputs))))
    elif form == "saved":
        judge.check("saved", tried("saved", lambda: reloaded(net)(*fed(inputs))))
    elif form == "numpy":
        other = tried("saved", lambda: reloaded(net)).to(ndl.cpu_numpy())
        arrays = [
            ndl.Tensor(i.numpy(), device=ndl.cpu_numpy(), dtype=str(i.dtype)[6:], requires_grad=False) for i in inputs
        ]
        judge.check("cpu_numpy", tried("cpu_numpy", lambda: other(*arrays)))
    elif form == "wider":
        wider(case, net)
    return "agrees"


def wider(case: dict[str, Any], net: Any) -> None:
    """One more along the first axis of every input, where torch takes it."""
    more = [make(d, (shape[0] + 1, *shape[1:]) if shape else shape, *rest) for d, shape, *rest in case["inputs"]]
    try:
        judge = Judge(case, more)
    except Exception:
        return
    judge.check("eager, one more in the batch", tried("wider", lambda: net(*fed(more))))


def reloaded(net: Any) -> Any:
    with tempfile.TemporaryDirectory() as place:
        ndl.save(net, Path(place) / "net.needle")
        return ndl.load(Path(place) / "net.needle")


# -- shrinking --------------------------------------------------------------------------------------------------------------


def smaller(case: dict[str, Any]) -> Iterable[dict[str, Any]]:
    first, steps = len(case["inputs"]), case["steps"]
    for k in range(1, len(steps)):  # without the last steps
        outs = [o for o in case["outputs"] if o < first + len(steps) - k]
        yield {**case, "steps": steps[:-k], "outputs": outs or [first + len(steps) - k - 1]}
    for o in case["outputs"]:
        if len(case["outputs"]) > 1:
            yield {**case, "outputs": [o]}
    for i in range(len(steps)):  # without a step, whose readers read its first argument instead
        ref = next((a for a in steps[i][1] if isinstance(a, tuple) and a[:1] == ("v",)), None)
        if ref is not None and len(steps) > 1:
            yield without(case, first + i, ref)
    for i, (dtype, shape, seed, kind) in enumerate(case["inputs"]):
        if kind != "plain":
            yield {**case, "inputs": [*case["inputs"][:i], (dtype, shape, seed, "plain"), *case["inputs"][i + 1 :]]}
    for i, (name, args, kwargs) in enumerate(steps):
        for k in kwargs:
            rest = {n: v for n, v in kwargs.items() if n != k}
            yield {**case, "steps": [*steps[:i], (name, args, rest), *steps[i + 1 :]]}


def without(case: dict[str, Any], at: int, instead: Any) -> dict[str, Any]:
    def renamed(v: Any) -> Any:
        if isinstance(v, tuple) and v[:1] == ("v",):
            return renamed(instead) if v[1] == at else ("v", v[1] - (v[1] > at), *v[2:])
        if isinstance(v, tuple) and v[:1] != ("c",):
            return tuple(renamed(i) for i in v)
        return v

    steps = [
        (n, renamed(a), {k: renamed(v) for k, v in kw.items()})
        for i, (n, a, kw) in enumerate(case["steps"])
        if i + len(case["inputs"]) != at
    ]
    outs = sorted({o - (o > at) for o in case["outputs"] if o != at}) or [len(case["inputs"]) + len(steps) - 1]
    return {**case, "steps": steps, "outputs": outs}


def never_drawn(cases: int = 3000) -> list[str]:
    """Rules of functions that no case of the first `cases` has: for whoever adds a rule."""
    seen: set[Any] = set()
    for seed in range(cases):
        seen |= {targets()[name][1] for name, *_ in draw(random.Random(f"{NAME} {seed}"))["steps"]}
    return sorted({inspect.getmodule(r).__name__ + "." + r.__name__ for _, r in targets().values() if r not in seen})  # type: ignore[union-attr]
