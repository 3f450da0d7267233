"""`exe.export`: plans and their packed weights as a file that `libneedle.so` runs without Python (csrc/capi)."""

from __future__ import annotations

import inspect
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from needle import _core
from needle.autograd import Spec, Unsupported
from needle.complex_numbers import Complex
from needle.files import replacing
from needle.graph import GraphModule, Node
from needle.graph.structure import is_record, members
from needle.nn.module import Module
from needle.serialize import save

from .builder import PlanInfo
from .compiled import CompiledPlan
from .constants import Constant
from .settings import Choice

OTHER_ISA = """
import pickle, sys
import needle as ndl
from needle.executor.executable import Executable
specs, choice = pickle.load(open(f"{sys.argv[1]}/plans", "rb"))
exe = Executable(ndl.load(f"{sys.argv[1]}/net"), choice)
for one in specs:
    exe._plan_for(repr(one), one, [])
exe.export(sys.argv[2])
"""


def leaf_names(value: Any, name: str, leaf: type) -> Iterator[str]:
    """The places of the leaves of a nested value, in order: "logits", "states.0"; `name` where it is one."""
    if isinstance(value, leaf):
        yield name or "output"
        return
    if isinstance(value, Complex):
        parts: Any = {"real": value.real, "imag": value.imag}
    elif is_record(value):
        parts = members(value)
    elif isinstance(value, tuple | list):
        parts = value._asdict() if hasattr(value, "_asdict") else dict(enumerate(value))
    else:
        parts = value if isinstance(value, dict) else {}
    for key, part in parts.items():
        yield from leaf_names(part, f"{name}.{key}" if name else str(key), leaf)


def input_names(model: Callable, specs: Sequence[Any]) -> list[str]:
    """What the model calls its arrays; specs: the arguments that it is bound to."""
    if isinstance(model, GraphModule):
        names = [".".join(map(str, n.meta.get("place", (n.target,)))) for n in model.graph.inputs]
    else:
        try:
            names = list(inspect.signature(model.forward if isinstance(model, Module) else model).parameters)
        except ValueError:  # a function of C that tells nothing
            names = []
    names += [f"input {i}" for i in range(len(names), len(specs))]  # of *args
    return [name for first, spec in zip(names, specs, strict=False) for name in leaf_names(spec, first, Spec)]


def refusal(plan: CompiledPlan) -> str:
    """Why a plan is no file, "" for none."""
    if plan.device.name != "cpu":
        return f"a plan on the CPU, got one on {plan.device}"
    if not all(isinstance(info, PlanInfo) for info in plan.infos):
        return "ops of needle alone, got a model that another library runs in part"
    return ""


def derived_from(constants: Iterable[Constant], written: Container[int]) -> bool:
    """Whether one is computed from memory of `written`, and so is not what a parameter is."""
    left, seen = [c for c in constants if c.source is None], set[int]()
    while left:
        for c in left.pop().inputs:
            if c.source is not None and id(c.source.cached_data._handle) in written:
                return True
            if id(c) not in seen:
                seen.add(id(c))
                left.append(c)
    return False


def check(plans: Sequence[CompiledPlan]) -> None:
    """Raise where plans have no file."""
    if why := next(filter(None, map(refusal, plans)), ""):
        raise Unsupported(f"[export] expects {why}.")
    written = {id(write.tensor.cached_data._handle) for p in plans for write in p.writes}
    if any(derived_from(info.constants, written) for p in plans for info in p.infos):
        raise Unsupported(
            "[export] expects plans that read buffers as they are, got one with what is computed from a buffer that "
            "another writes; export one plan a file."
        )


def row(model: Callable, plan: CompiledPlan) -> tuple[Any, Any, list[str], list[str], list[tuple[list[float], str]]]:
    """A plan, the one that checks its inputs first or None, and the names of inputs and outputs, of which the last are
    what guards look at."""
    conditions = [(list(map(float, g.expected)), " ".join(g.text.split())) for g in plan.guards]
    looked_at = [f"condition {i}" for i in range(len(conditions))]
    checks = None if plan.condition_plan is None else plan.condition_plan.core
    return (
        plan.core,
        checks,
        input_names(model, plan.specs),
        [*leaf_names(plan.structure, "", Node), *looked_at],
        conditions,
    )


def write(
    path: Any, model: Callable, plans: Sequence[CompiledPlan], choice: Choice, isas: Sequence[str] | None
) -> None:
    """A file, whole or not there, with these plans for each instruction set: None is the one that runs here."""
    if not plans:
        raise ValueError("[export] there is no plan, call the executable first.")
    check(plans)
    rows = [row(model, p) for p in plans]
    wanted = list(dict.fromkeys(isas)) if isas is not None else [_core.isa()]
    if not wanted or isinstance(isas, str):
        raise ValueError(f"[export] isas expects names of instruction sets in a tuple, got {isas!r}.")
    try:
        with replacing(path) as part, tempfile.TemporaryDirectory() as folder:
            if wanted == [_core.isa()]:
                _core.write_plans(str(part), rows)
                return
            files = [f"{folder}/{isa}" for isa in wanted]
            for isa, file in zip(wanted, files, strict=True):
                if isa == _core.isa():
                    _core.write_plans(file, rows)
                else:
                    write_other(isa, file, Path(folder), model, plans, choice)
            _core.join_plan_files(str(part), files)
    except OSError as e:
        raise OSError(f"[export] cannot write {os.fspath(path)}: {e.strerror or e}.") from None


def write_other(
    isa: str, file: str, folder: Path, model: Callable, plans: Sequence[CompiledPlan], choice: Choice
) -> None:
    """The same plans, made by a process that runs another instruction set."""
    if not isinstance(model, Module):
        raise Unsupported(
            f"[export] expects a Module to plan for {isa}, got a function, which only {_core.isa()} runs here."
        )
    if not (folder / "net").exists():
        save(model, folder / "net")
        (folder / "plans").write_bytes(pickle.dumps(([p.specs for p in plans], choice)))
    done = subprocess.run(
        [sys.executable, "-c", OTHER_ISA, str(folder), file],
        env={**os.environ, "NEEDLE_ISA": isa, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        why = (done.stderr.strip() or "it was ended.").splitlines()[-1]
        raise RuntimeError(f"[export] no plan for {isa}: {why.partition('Error: ')[2] or why}")
