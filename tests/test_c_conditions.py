"""Exported models that hold for some inputs alone: they run as the executable does, and refuse what it refuses."""

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

from c_library import Failed, Model
from needle import nn, ops
from needle.nn.functional import Guard, GuardError

rng = np.random.default_rng(0)


class Checked(nn.Module):
    """Twice the input, where `look` of it is as expected."""

    def __init__(self, look: Callable, *expected: float, text: str = "it") -> None:
        super().__init__()
        self.look, self.guard = look, Guard(expected, text)

    def forward(self, x: Any) -> Any:
        self.guard(self.look(x))
        return x * 2


class Thrice(nn.Module):
    """Conditions on a result, on a constant and on the input itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = Guard((6.0,), "a\tsum"), Guard((3.0,), "rows"), Guard((1, 2, 3), "x")

    def forward(self, x: Any) -> Any:
        total = ops.summation(x)
        self.first(total)
        self.second(ndl.Tensor(np.array(3.0, "float32")) + total * 0)
        self.third(x)
        return total, x


LINE = np.arange(1, 4, dtype="float32")
# A model, inputs that it takes, and some that it refuses.
CASES: dict[str, tuple[Callable, np.ndarray, np.ndarray]] = {
    "truth": (lambda: Checked(lambda x: ops.gt(ops.summation(x), 0), 1), LINE, -LINE),
    "truths": (lambda: Checked(lambda x: ops.gt(x, 1), 0, 1, 1), LINE, LINE[::-1]),
    "float": (lambda: Checked(lambda x: ops.max_along(x, 0)[0], 3.0), LINE, LINE + 2**-20),
    "double": (lambda: Checked(ops.summation, 6.0), LINE.astype("float64"), LINE + 1e-15),
    "whole": (lambda: Checked(lambda x: x, 1, 2, 3), LINE.astype("int32"), LINE.astype("int32") + 1),
    "long": (lambda: Checked(ops.summation, 6), LINE.astype("int64"), LINE.astype("int64") * 2),
    "not a number": (lambda: Checked(ops.summation, 6.0), LINE, LINE * np.float32("nan")),
    "nothing": (lambda: Checked(lambda x: ops.summation(x) * 0 + 1, 1), LINE[:0], LINE[:0]),
    "several": (Thrice, LINE, LINE[::-1]),
    "quotes": (lambda: Checked(ops.summation, 6.0, text='x % 2 == "%s" or é\nb'), LINE, -LINE),
}


def flat(value: Any) -> list[np.ndarray]:
    return list(value) if isinstance(value, tuple) else [value]


@pytest.mark.parametrize("name", CASES)
def test_conditions_hold_in_files(name: str, tmp_path: Path) -> None:
    make, taken, refused = CASES[name]
    refused = refused.astype(taken.dtype) if name != "double" else refused.astype("float64") + 1e-15
    net = make().eval()
    exe = ndl.compile(net, (taken,))
    isas = tuple(dict.fromkeys((ndl.isa(), "scalar"))) if name == "several" else (ndl.isa(),)
    exe.export(tmp_path / "model.ndlc", [(taken,)], isas=isas)
    model = Model(tmp_path / "model.ndlc")
    wanted = flat(exe(taken))
    assert len(model.tensors("output")) == len(wanted)
    for _ in range(2):
        for a, b in zip(model(taken), wanted, strict=True):
            np.testing.assert_array_equal(a, b, strict=True)
        if refused.size:
            with pytest.raises(GuardError) as eager:
                exe(refused)
            with pytest.raises(Failed) as failed:
                model(refused)
            own = " ".join(str(eager.value).split())
            assert str(failed.value) == own.replace("[convert]", "[needle_run]")
    with pytest.raises(Failed, match=rf"^\[needle\] the plan has {len(wanted)} outputs, got number {len(wanted)}\.$"):
        from c_library import Tensor, check, library

        check(library.needle_output(model.handle, 0, len(wanted), Tensor()))


def test_threads_are_refused_one_by_one(tmp_path: Path) -> None:
    exe = ndl.compile(Thrice().eval(), (LINE,))
    exe.export(tmp_path / "model.ndlc")
    model = Model(tmp_path / "model.ndlc")
    seen: list[str] = []

    def run(x: np.ndarray, count: int) -> None:
        for _ in range(count):
            try:
                seen.append(f"{model(x)[0]:g}")
            except Failed as e:
                seen.append(str(e).rpartition("got ")[2])

    threads = [threading.Thread(target=run, args=(x, 50)) for x in (LINE, LINE * 2, LINE, LINE * 3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert {k: seen.count(k) for k in seen} == {"6": 100, "12.": 50, "18.": 50}


def packed() -> tuple[Any, tuple, tuple]:
    """A tagger of packed rows; a length that is none is refused."""
    import torch

    class Tagger(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cells, self.head = torch.nn.LSTM(4, 3, batch_first=True, bidirectional=True), torch.nn.Linear(6, 2)

        def forward(self, x: Any, lengths: Any) -> Any:
            rows = torch.nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            y, _ = torch.nn.utils.rnn.pad_packed_sequence(self.cells(rows)[0], batch_first=True, total_length=5)
            return self.head(y)

    x = torch.randn(3, 5, 4)
    return Tagger(), (x, torch.tensor([2, 5, 1])), (x, torch.tensor([2, 6, 1]))


def causal() -> tuple[Any, tuple, tuple]:
    """torch's decoder asks whether its mask is causal."""
    import torch

    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    x, mask = torch.randn(2, 4, 8), torch.nn.Transformer.generate_square_subsequent_mask(4)
    return torch.nn.TransformerEncoder(layer, 1), (x, mask), (x, torch.zeros(4, 4))


@pytest.mark.parametrize("make", [packed, causal])
def test_converted_nets_with_conditions(make: Callable, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    import torch2needle

    torch.manual_seed(0)
    net, taken, refused = make()
    net = net.eval()
    exe = torch2needle.compile(net, taken)
    exe.export(tmp_path / "model.ndlc")
    names = exe.model.input_names
    with pytest.raises(TypeError, match=r"^\[export\] examples expects a list of calls, got one with "):
        exe.export(tmp_path / "model.ndlc", dict(zip(names, taken, strict=True)))
    exe.export(tmp_path / "model.ndlc", [dict(zip(names, taken, strict=True))])
    model = Model(tmp_path / "model.ndlc")
    assert model.plans == 1 and [t.name.decode() for t in model.tensors("input")] == names
    with torch.no_grad():
        wanted = net(*taken).numpy()
    np.testing.assert_array_equal(model(*(t.numpy() for t in taken))[0], exe(*taken).numpy())
    np.testing.assert_allclose(exe(*taken).numpy(), wanted, atol=1e-5)
    with pytest.raises(Failed, match=r"^\[needle_run\] the model holds for inputs that answer `.*` with .*, got .*\.$"):
        model(*(t.numpy() for t in refused))
