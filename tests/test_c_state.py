"""Exported models that keep state: what a run writes the next one reads, as executables do; one copy for each opened file."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import needle as ndl
from needle.backend_selection import BACKEND

if BACKEND == "np":
    pytest.skip("files are made from plans, which the numpy backend has not", allow_module_level=True)

from c_library import Failed, Model, addresses, library
from needle import nn, ops
from needle.autograd import Unsupported
from needle.nn.functional import Guard, GuardError


def buffer(array: Any) -> ndl.Tensor:
    return ndl.Tensor(np.asarray(array), dtype=str(np.asarray(array).dtype), requires_grad=False)


def floats(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype("float32")


class Cache(nn.Module):
    """A cache that rows are written into from a place on, also by slices of itself; whole numbers count the calls."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.kept, self.calls = buffer(floats(2, 6, 4)), buffer(np.zeros((), "int64"))

    def forward(self, x: Any, place: Any) -> Any:
        self.calls.data = self.calls + 1
        old = self.kept[:, 1:3] * 2
        self.kept.data = ops.index_copy(self.kept, 1, place, self.linear(x))
        return old, self.kept.relu(), self.calls


class Average(nn.Module):
    """A running mean of rows, whatever their number; a flag that stays set."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.seen = buffer(np.zeros(3, "float32")), buffer(np.zeros(3, "bool"))

    def forward(self, x: Any) -> Any:
        self.mean.data = self.mean * 0.75 + ops.mean(x, (0,)) * 0.25
        self.seen.data = self.seen | ops.gt(self.mean, 0.5)
        return x - self.mean, self.seen


class Checked(nn.Module):
    """A counter of inputs whose sum is not negative; others are refused before anything is written."""

    def __init__(self) -> None:
        super().__init__()
        self.total, self.guard = buffer(np.zeros((), "float32")), Guard((1.0,), "x.sum() >= 0")

    def forward(self, x: Any) -> Any:
        total = ops.summation(x)
        self.guard(ops.ge(total, 0))
        self.total.data = self.total + total
        return self.total * 2, total


def cell() -> Any:
    """A recurrent cell of torch that keeps what it knows, in part of a buffer."""
    torch = pytest.importorskip("torch")
    import torch2needle

    class Cell(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = torch.nn.GRUCell(4, 5)
            self.register_buffer("hidden", torch.zeros(2, 2, 5))
            self.register_buffer("step", torch.tensor(0))

        def forward(self, x: Any) -> Any:
            self.hidden[:, 1] = self.cell(x, self.hidden[:, 1])
            self.step += 1
            return self.hidden[:, 1] * self.step

    torch.manual_seed(0)
    return torch2needle.convert(Cell().eval(), (torch.zeros(2, 4),))


NETS: dict[str, tuple[Callable[[], Any], Callable[[int], tuple]]] = {
    "cache": (Cache, lambda i: (floats(2, 2, 4) + i, np.array([2 * i, 2 * i + 1]))),
    "average": (Average, lambda i: (floats(5, 3) + i,)),
    "checked": (Checked, lambda i: (np.arange(3, dtype="float32") * i,)),
    "cell": (cell, lambda i: (floats(2, 4) * i,)),
}


def flat(value: Any) -> list[np.ndarray]:
    return list(value) if isinstance(value, tuple | list) else [value]


def equal(model: Model, exe: Any, xs: tuple, plan: int = 0) -> None:
    for a, b in zip(model(*xs, plan=plan), flat(exe(*xs)), strict=True):
        np.testing.assert_array_equal(a, b, strict=True)


@pytest.mark.parametrize("name", NETS)
def test_runs_follow_each_other_as_those_of_the_executable(name: str, tmp_path: Path) -> None:
    make, given = NETS[name]
    exe = ndl.compile(make().eval(), given(0))
    flat(exe(*given(1)))
    exe.export(tmp_path / "model.ndlc")  # with the state of now
    data = (tmp_path / "model.ndlc").read_bytes()
    model, other = Model(tmp_path / "model.ndlc"), Model(tmp_path / "model.ndlc")
    assert model.has_state
    begun = [model(*given(i)) for i in range(3)]
    for i in range(3):
        for a, b in zip(flat(exe(*given(i))), begun[i], strict=True):
            np.testing.assert_array_equal(a, b, strict=True)
    equal(model, exe, given(2))
    model.reset()
    for m in (model, other):  # each from its own beginning
        for i in range(3):
            for a, b in zip(m(*given(i)), begun[i], strict=True):
                np.testing.assert_array_equal(a, b, strict=True)
    assert (tmp_path / "model.ndlc").read_bytes() == data


def test_plans_share_the_state(tmp_path: Path) -> None:
    exe = ndl.compile(Average().eval(), (floats(5, 3),))
    xs = [floats(n, 3) for n in (5, 1, 3)]
    exe.export(tmp_path / "model.ndlc", [(x,) for x in xs], isas=tuple(dict.fromkeys((ndl.isa(), "scalar"))))
    model = Model(tmp_path / "model.ndlc")
    for plan in (0, 2, 1, 1, 0):
        equal(model, exe, (xs[plan],), plan)


def test_other_instruction_sets_keep_state(tmp_path: Path) -> None:
    exe = ndl.compile(Cache().eval(), NETS["cache"][1](0))
    exe.export(tmp_path / "model.ndlc", isas=("scalar",))
    model = Model(tmp_path / "model.ndlc")
    for i in range(3):
        for a, b in zip(model(*NETS["cache"][1](i)), flat(exe(*NETS["cache"][1](i))), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-6, strict=True)


def test_refused_inputs_change_no_state(tmp_path: Path) -> None:
    x = np.arange(3, dtype="float32")
    exe = ndl.compile(Checked().eval(), (x,))
    exe.export(tmp_path / "model.ndlc")
    model = Model(tmp_path / "model.ndlc")
    equal(model, exe, (x,))
    with pytest.raises(GuardError) as eager:
        exe(-x)
    with pytest.raises(
        Failed, match=r"^\[needle_run\] the model holds for inputs that answer `x\.sum\(\) >= 0` with 1"
    ) as e:
        model(-x)
    assert str(e.value) == " ".join(str(eager.value).split()).replace("[convert]", "[needle_run]")
    equal(model, exe, (x,))


def test_one_run_at_a_time(tmp_path: Path) -> None:
    """What runs beside another is refused and changes nothing, so the state counts those that came to their end."""

    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.count = buffer(np.zeros(1 << 16, "float32"))

        def forward(self, x: Any) -> Any:
            self.count.data = self.count + x
            return self.count[:2]

    x = np.ones(1 << 16, "float32")
    ndl.compile(Counter().eval(), (x,)).export(tmp_path / "model.ndlc")
    model = Model(tmp_path / "model.ndlc")
    done: list[bool] = []

    def work() -> None:
        out = np.zeros(2, "float32")
        for _ in range(300):
            failed = library.needle_run(model.handle, 0, addresses([x]), addresses([out]))
            done.append(not failed)
            if failed:
                text = library.needle_last_error().decode()
                assert text == "[needle_run] expects one run at a time of a model that keeps state, got another's."

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(done) == 1200 and model(x)[0].tolist() == [sum(done) + 1] * 2


def test_models_without_state(tmp_path: Path) -> None:
    ndl.compile(ops.exp, (floats(3),)).export(tmp_path / "model.ndlc")
    model = Model(tmp_path / "model.ndlc")
    model.reset()  # of nothing
    assert not model.has_state and library.needle_has_state(None) == 0
    assert library.needle_reset(None) != 0
    assert library.needle_last_error() == b"[needle] expects a model, got NULL."


def test_what_is_computed_from_state_once_is_refused(tmp_path: Path) -> None:
    """One plan writes what another has a product of."""

    class Learned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = buffer(floats(4, 4))

        def forward(self, x: Any) -> Any:
            if x.shape[0] == 1:
                self.weight.data = self.weight * 0.5 + x
            return x @ (self.weight * 2)

    exe = ndl.compile(Learned().eval(), (floats(1, 4),))
    wide = floats(9, 4)
    with pytest.raises(Unsupported, match=r"^\[export\] expects plans that read buffers as they are, got .*\.$"):
        exe.export(tmp_path / "model.ndlc", [(floats(1, 4),), (wide,)])
    for x in (floats(1, 4), wide):
        exe.export(tmp_path / "model.ndlc", [(x,)])
        model = Model(tmp_path / "model.ndlc")
        assert model.has_state == (len(x) == 1)
        for _ in range(2):
            equal(model, exe, (x,))
