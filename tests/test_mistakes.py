"""What users get wrong: each is refused in a sentence that says what is wrong, or right all the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

import needle as ndl  # noqa: E402
import torch2needle  # noqa: E402
from torch2needle import ConversionError, Unsupported, convert  # noqa: E402

X = torch.linspace(-1, 1, 8).reshape(2, 4)


class Net(nn.Module):
    def __init__(self, f: Callable) -> None:
        super().__init__()
        self.linear, self.f = nn.Linear(4, 4), f

    def forward(self, x: torch.Tensor, scale: float = 2.0) -> Any:
        return self.f(self.linear, x) if scale == 2.0 else self.linear(x) * scale


class Pairs(nn.Module):
    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return batch["a"] + batch["b"]


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU()).eval()


def autocast(linear: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return linear(x).float()


def no_autocast(linear: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", enabled=False):
        return linear(x)


def meta() -> nn.Module:
    with torch.device("meta"):
        return nn.Linear(4, 3)


def sparse() -> nn.Module:
    model = Net(lambda linear, x: linear(x))
    model.table = nn.Parameter(torch.eye(2).to_sparse())
    return model


TAKES = r"\[convert\] expects an example that the model takes: "
REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "a list of lists": (lambda: convert(plain(), [[X]]), Unsupported, TAKES + "TypeError: linear.* not list"),
    "numpy example": (
        lambda: convert(plain(), X.numpy()),
        Unsupported,
        TAKES + "TypeError: linear.* not numpy.ndarray",
    ),
    "number": (lambda: convert(plain(), 3), Unsupported, TAKES + "TypeError: linear.* not int"),
    "shape": (lambda: convert(plain(), (2, 4)), ValueError, "example expects at most 1 inputs, got 2"),
    "wrong name": (lambda: convert(plain(), {"y": X}), Unsupported, TAKES + ".*unexpected keyword argument 'y'"),
    "wrong width": (lambda: convert(plain(), X[:, :3]), Unsupported, TAKES + "RuntimeError: mat1 and mat2"),
    "wrong dtype": (lambda: convert(plain(), X.double()), Unsupported, TAKES + "RuntimeError: .*Double and Float"),
    "inputs of a dict": (lambda: convert(Pairs(), {"a": X, "b": X}), Unsupported, TAKES + ".*argument 'a'"),
    "no inputs": (lambda: torch2needle.compile(plain(), ()), Unsupported, TAKES + ".*missing 1 required"),
    "a broken forward": (lambda: convert(Net(lambda m, x: m.x(x)), X), Unsupported, TAKES + "AttributeError: .*'x'"),
    "class": (lambda: convert(nn.Linear), TypeError, "expects an nn.Module.* got type"),
    "weights": (lambda: convert(plain().state_dict()), TypeError, "expects an nn.Module.* got OrderedDict"),
    "lazy": (
        lambda: convert(nn.Sequential(nn.LazyLinear(3)), X),
        Unsupported,
        "expects values for 0.weight, got a lazy",
    ),
    "meta": (lambda: convert(meta(), X), Unsupported, "expects values for weight, got a tensor on the meta device"),
    "sparse parameter": (
        lambda: convert(sparse(), X),
        Unsupported,
        "expects a dense tensor for table, got a sparse_coo",
    ),
    "sparse input": (
        lambda: convert(plain(), X.to_sparse()),
        Unsupported,
        "dense tensor for the example, got a sparse",
    ),
    "quantized": (lambda: convert(nn.Sequential(quantized()), X), Unsupported, "got a quantized Linear at 0"),
    "autocast": (lambda: convert(Net(autocast).eval(), X), ConversionError, "forward turns on autocast"),
    "dropout": (lambda: convert(Net(lambda m, x: F.dropout(m(x))), X), ConversionError, "training=self.training"),
    "generator": (lambda: convert(Net(lambda m, x: (v for v in x)), X), ConversionError, "is of type generator"),
    "set": (lambda: convert(Net(lambda m, x: {m(x)}), X), ConversionError, "an output is of type set"),
    "training": (
        lambda: torch2needle.compile(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), X),
        ValueError,
        "1 modules are in training mode",
    ),
    "no argument": (lambda: convert(plain(), X)(), TypeError, "input input is missing"),
    "more arguments": (lambda: convert(plain(), X)(X, X), TypeError, "expects at most 1 inputs, got 2"),
    "a number at the call": (lambda: convert(plain(), X)(3), TypeError, "input input expects an array, got int"),
    "a key less": (lambda: convert(Pairs(), ({"a": X, "b": X},))({"a": X}), TypeError, "input batch.b is missing"),
    "a fixed number": (lambda: convert(Net(lambda m, x: m(x)), X)(X, scale=3.0), TypeError, "got scale"),
}


def quantized() -> nn.Module:
    return torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(4, 3)), {nn.Linear})[0]


@pytest.mark.filterwarnings("ignore:.*deprecated")
@pytest.mark.parametrize("name", REFUSED)
def test_mistakes_are_refused_in_a_sentence(name: str) -> None:
    call, kind, text = REFUSED[name]
    with pytest.raises(kind, match=f"(?s){text}"):
        call()


RIGHT: dict[str, Callable[[nn.Module, torch.Tensor], Any]] = {
    "autocast that is off": no_autocast,
    "None": lambda linear, x: None,
    "text beside a tensor": lambda linear, x: {"y": linear(x), "text": "hi", 3: 4},
    "a shape": lambda linear, x: (linear(x), x.shape),
    "printing": lambda linear, x: (print(end=""), linear(x))[1],
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_odd_is_right(name: str) -> None:
    model = Net(RIGHT[name]).eval()
    got, want = convert(model, X)(X), model(X)

    def same(a: Any, b: Any) -> bool:
        if isinstance(b, torch.Tensor):
            return np.allclose(a.numpy(), b.detach().numpy(), atol=1e-6)
        if isinstance(b, dict):
            return a.keys() == b.keys() and all(same(a[k], b[k]) for k in b)
        return all(map(same, a, b)) and len(a) == len(b) if isinstance(b, tuple) else a == b

    assert same(got, want)


def test_a_loss_of_torch_is_named() -> None:
    net, x = ndl.nn.Linear(4, 2), np.ones((3, 4), "float32")
    optimizer = ndl.optim.SGD(net.parameters(), lr=0.1)
    losses = (nn.MSELoss(), F.mse_loss, nn.CrossEntropyLoss(), lambda a, b: torch.softmax(a, 1).sum())
    for loss in losses:
        with pytest.raises(
            TypeError, match=r"\[compile_step\] expects functions of needle's tensors, got a call of torch"
        ):
            ndl.compile_step(net, loss, optimizer, (x, np.ones((3, 2), "float32")))
    with pytest.raises(TypeError, match=r"\[compile\] expects functions of needle's tensors, got a call of torch"):
        ndl.compile(torch.relu, x)
    with pytest.raises(TypeError, match="unsupported operand"):  # of the user's own, as it is
        ndl.compile_step(net, lambda a, b: 3 + "a", optimizer, (x, x))
