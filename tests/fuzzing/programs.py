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
from pathlib import Path
from typing import Any

import numpy as np
import torch

import needle as ndl
import operator_fusion
import torch2needle
from torch2needle.report import ConversionError
from torch2needle.rules.registry import is_inplace

from . import program_layers, program_shapes  # noqa: F401 - generators
from .frame import Wrong
from .program_arguments import DTYPES, INTEGERS, WHOLE, State, arguments
from .program_model import Program, make, program, targets

NAME, SAMPLE, FULL, SECONDS = "programs", 3000, 200_000, 30
STEPS = 7  # at most
TOLERANCE = 1e-5  # relative to the largest value
NARROW = ("uint8", "int8", "int16")
SHAKE = 3e-7  # relative: some roundings of float32
REMNANT = 1e-12  # relative to the operands: what some roundings of float64 leave of an exact 0
ORDERED = ("sort", "argsort", "topk", "kthvalue", "median", "nanmedian")
SPREADS = (
    "torch.fft.",
    "torch.linalg.",
    "torch.trapezoid",
    "torch.trapz",
)  # infinite numbers meet others, in torch's order
ONE_PASS = ("var_mean", "std_mean")  # whose mean is NaN in torch where any number but the last is infinite


# -- drawing ----------------------------------------------------------------------------------------------------------------


def draw(rng: random.Random) -> dict[str, Any]:
    """Inputs, steps that torch takes (of which the last may be one that it refuses), outputs and the forms to check."""
    s = State(rng, make)
    s.whole = s.chance(0.2)
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
    if s.chance(0.05) and any(d in INTEGERS for d, *_ in case["inputs"]):
        case["form"] = rng.choice(("uint8", "int8", "int16"))
    return case


def drawn_step(s: State, case: dict[str, Any], name: str) -> Any:
    """Adds a step of this name that torch takes, or returns None."""
    target, rule = targets()[name]
    made = arguments(s, rule, name)
    if made is None or (made[0] and made[0][0] == "unfit"):
        return None
    step = (name, *made)
    trial = {**case, "steps": [*case["steps"], step], "outputs": []}
    if name.startswith("torch.linalg.") and not all(t.isfinite().all() for t in tensors(s.values)):
        return None  # LAPACK may crash where a number is none
    try:
        values = [v.clone() if isinstance(v, torch.Tensor) else v for v in s.values]
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = program(trial).call(*step, values)
    except Exception:
        return None
    if name.rpartition(".")[2] in (*ORDERED, *ONE_PASS) or name.startswith(SPREADS):
        x = program(trial).value(made[0][0], s.values)
        if x.isinf().any() if name.endswith(ONE_PASS) or name.startswith(SPREADS) else has_ties(name, made, x):
            return None
    if result is NotImplemented or too_large(result) or not defined(name, made, s):
        return None
    if name.endswith("cholesky_ex") and any(bool(info.any()) for info in list(tensors(result))[1:]):
        return None  # whatever a matrix that has no factor leaves
    if is_inplace(target):
        try:
            s.values = run_all(trial)  # other values may share the memory
        except Exception:  # which torch may refuse to write
            return None
    else:
        s.values.append(result)
    case["steps"].append(step)
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
    return any(
        t.numel() > 4000 or str(t.dtype)[6:] not in (*DTYPES, *WHOLE, "float16", "bfloat16") for t in tensors(result)
    )


def has_ties(name: str, made: Any, x: torch.Tensor) -> bool:
    """Whether equal elements leave the order open."""
    args, kwargs = made
    if name.endswith("topk") and False in (kwargs.get("sorted"), *args[4:]):
        return True  # in whatever order
    place = 2 if name.endswith(("topk", "kthvalue")) else 1
    axis = kwargs.get("dim", args[place] if len(args) > place else -1)
    if x.ndim == 0 or x.dtype == torch.bool or x.is_complex():  # torch orders complex numbers where there are none
        return x.ndim > 0
    steps = x.sort(dim=axis).values.diff(dim=axis)
    return bool((steps == 0).any() or steps.isnan().any())


def defined(name: str, made: Any, s: State) -> bool:
    """False for a cast of a float that the integer cannot hold, where C++ and processors differ, and for factors of NaN."""
    found = [v for v in tensors(tuple(s.values)) if v.is_floating_point()]
    if name.rpartition(".")[2] == "qr" and not all(v.isfinite().all() for v in found):  # LAPACK's own order of steps
        return False
    large = any(bool(((v.abs() >= 2**31) | v.isnan()).any()) for v in found)
    return not large or "int" not in repr(made) + name.replace("long", "int").replace("copy", "int")


# -- judging ----------------------------------------------------------------------------------------------------------------


def outputs(value: Any) -> list[Any]:
    """Arrays and numbers of a result, in order; complex ones as pairs along a last axis, whose errors belong together."""
    if isinstance(value, ndl.Complex):
        return [np.stack([value.real.numpy(), value.imag.numpy()], -1)]
    if isinstance(value, complex) or (isinstance(value, np.ndarray) and np.iscomplexobj(value)):
        value = torch.as_tensor(value)
    if isinstance(value, torch.Tensor) and value.is_complex():
        return [torch.view_as_real(value.detach().resolve_conj())]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, tuple | list):
        return [o for v in value for o in outputs(v)]
    return [value]


def array(value: Any) -> np.ndarray:
    if isinstance(value, torch.Tensor):
        wider = torch.float32 if value.dtype in (torch.float16, torch.bfloat16) else value.dtype
        value = value.detach().resolve_neg().to(torch.int32 if str(value.dtype)[6:] in NARROW else wider)
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
            if mine.shape != theirs.shape and not self.rounds_sizes(i):
                raise Wrong(f"{form}: output {i} has shape {mine.shape}, torch {theirs.shape}")
            if mine.dtype != theirs.dtype:
                raise Wrong(f"{form}: output {i} has dtype {mine.dtype}, torch {theirs.dtype}")
            if mine.shape == theirs.shape and not np.array_equal(mine, theirs, equal_nan=mine.dtype.kind == "f"):
                self.compare(form, i, mine)

    def rounds_sizes(self, i: int) -> bool:
        """Whether rounding decides how large an output is, as of the unique ones among computed numbers."""
        if self.exact is None:
            self.settle()
        return self.resized[i]

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
            own = unsure + np.abs(np.where(finite & np.isfinite(theirs), theirs - want, 0))
            agree |= own > np.abs(want) / 2  # rounding alone makes anything of it, an infinity, too
        agree |= (
            (mine == theirs) | (np.isnan(mine) & np.isnan(theirs)) | (mine == want) | (np.isnan(mine) & np.isnan(want))
        )
        agree |= np.isnan(unsure) | (np.abs(mine - theirs) <= 1e-6 * np.abs(theirs))
        if not agree.all():
            at = tuple(int(k) for k in np.argwhere(~agree)[0])
            raise Wrong(f"{form}: output {i} is {mine[at]!r} at {at}, torch has {theirs[at]!r}")

    def settle(self) -> None:
        """Results in float64, and how far some roundings move them: nan where they turn them over."""
        SHAKES.manual_seed(7)
        double = True
        try:
            self.exact = [array(o) for o in outputs(self.run(program(self.case, double=True)))]
        except RuntimeError:  # torch takes some calls in float32 alone, such as an empty result of conv_transpose2d
            double, self.exact = False, self.want
        self.resized = [e.shape != w.shape for e, w in zip(self.exact, self.want, strict=True)]
        self.exact = [w if o else e for e, w, o in zip(self.exact, self.want, self.resized, strict=True)]
        self.unsure = [np.full(e.shape, np.nan if o else 0.0) for e, o in zip(self.exact, self.resized, strict=True)]
        shakes = [shaker(how) for how in (1, -1, 0, 0)] + ([without_remnants] if double else [])
        for shake in shakes:
            with np.errstate(all="ignore"):
                model = program(self.case, double=double, shake=shake)
                shaken = [array(o) for o in outputs(self.run(model))]
                for k, (e, m) in enumerate(zip(self.exact, shaken, strict=True)):
                    if m.shape != e.shape:
                        self.resized[k], self.unsure[k] = True, np.full(e.shape, np.nan)
                        continue
                    away = np.abs(e.astype("float64") - m.astype("float64"))
                    if e.dtype.kind != "f":
                        away = np.where(away > 0, np.nan, 0.0)
                    away = np.where((e == m) | (np.isnan(e) & np.isnan(m)), 0.0, away) if e.dtype.kind == "f" else away
                    self.unsure[k] = self.unsure[k] + 8 * away
        for k, u in enumerate(self.unsure):  # what one element was spared by chance
            if np.isfinite(u).any():
                self.unsure[k] = np.maximum(u, np.mean(u, where=np.isfinite(u)))


def shaker(how: int) -> Callable[[Any, Any], Any]:
    def shake(t: torch.Tensor) -> None:
        noise = torch.full_like(t, how) if how else torch.randn(t.shape, generator=SHAKES, dtype=t.dtype)
        t.copy_(t * (1 + SHAKE * noise))

    return lambda v, operands: changed(v, shake)


def without_remnants(v: Any, operands: Any) -> Any:
    """The result with zeros where its operands cancel but for roundings."""
    sizes = [(t if t.is_complex() else t.double())[t.isfinite()].abs() for t in tensors(operands)]
    largest = max((float(s.max()) for s in sizes if s.numel()), default=0.0)
    return changed(v, lambda t: t.masked_fill_(t.abs() < REMNANT * largest, 0))


def changed(v: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """A result whose arrays of floats are written over."""
    for t in tensors(v):
        if (t.is_floating_point() or t.is_complex()) and t.numel() and not overlapping(t):
            change(t)
    return v


SHAKES = torch.Generator()


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
        try:
            exported = torch.export.export(model, fed(inputs))
        except Exception:
            return "torch.export refuses"
        net = tried("export", lambda: torch2needle.convert(exported))
    else:
        example = None if form in ("without an example", *NARROW) else fed(inputs)
        net = tried("convert", lambda: torch2needle.convert(model, example))
    how = {"export": "exported, eager", "without an example": "without an example, eager"}.get(form, "eager")
    judge.check(how, tried(how, lambda: net(*fed(inputs))))
    judge.check("compiled", tried("compiled", lambda: ndl.compile(net, fed(inputs))(*fed(inputs))))
    if form == "fused":
        fused = tried("fuse", lambda: operator_fusion.fuse(net))
        judge.check("fused", tried("fused", lambda: ndl.compile(fused, fed(inputs))(*fed(inputs))))
    elif form == "saved":
        judge.check("saved", tried("saved", lambda: reloaded(net)(*fed(inputs))))
    elif form == "numpy" and not any(i.is_complex() for i in inputs):
        other = tried("saved", lambda: reloaded(net)).to(ndl.cpu_numpy())
        arrays = [
            ndl.Tensor(i.numpy(), device=ndl.cpu_numpy(), dtype=str(i.dtype)[6:], requires_grad=False) for i in inputs
        ]
        judge.check("cpu_numpy", tried("cpu_numpy", lambda: other(*arrays)))
    elif form == "wider":
        wider(case, net)
    elif form in NARROW:
        narrow(case, net, inputs)
    return "agrees"


def wider(case: dict[str, Any], net: Any) -> None:
    """One more along the first axis of every input, where torch takes it."""
    more = [make(d, (shape[0] + 1, *shape[1:]) if shape else shape, *rest) for d, shape, *rest in case["inputs"]]
    try:
        judge = Judge(case, more)
    except Exception:
        return
    if any(name.endswith(ONE_PASS) or name.startswith(SPREADS) for name, *_ in case["steps"]) and not all(
        np.isfinite(w).all() for w in judge.want
    ):
        return
    judge.check("eager, one more in the batch", tried("wider", lambda: net(*fed(more))))


def narrow(case: dict[str, Any], net: Any, inputs: list[torch.Tensor]) -> None:
    """Whole numbers in the dtype that the form names: torch's values, or refused."""
    dtype = getattr(torch, case["form"])
    given = [i.to(dtype) if str(i.dtype)[6:] in INTEGERS else i for i in inputs]
    if any(name.endswith((".all", ".any")) for name, *_ in case["steps"]):  # bool here, uint8 in torch
        return
    try:
        judge = Judge(case, given)
    except Exception:
        return
    judge.check("narrow", tried("narrow", lambda: net(*fed(given))))
    judge.check("narrow, compiled", tried("narrow, compiled", lambda: ndl.compile(net, fed(given))(*fed(given))))


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
