"""What an executable is given and what became of its model: said in a sentence, or seen; nothing in silence."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import needle as ndl
import torch2needle
from needle import nn
from needle.graph import symbolic

torch = pytest.importorskip("torch")


def image(*shape: int) -> np.ndarray:
    return np.random.default_rng(4).standard_normal(shape, dtype="float32")


def close(got: Any, want: Any) -> None:
    got, want = np.asarray(got), np.asarray(want)
    assert got.shape == want.shape
    assert np.abs(got - want).max() <= 1e-5 * np.abs(want).max()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv(4, 16, 3, padding=1, layout="torch"), nn.BatchNorm2d(16)
        self.layers, self.scale = [nn.Conv(16, 16, 1, layout="torch")], 2.0
        self.named = {"last": nn.Linear(6, 6, layout="torch")}
        self.fc, self.tail = nn.Linear(6, 6, layout="torch"), nn.Sequential(nn.ReLU())

    def forward(self, x: Any) -> Any:
        x = self.norm(self.conv(x)) * self.scale
        for layer in self.layers:
            x = layer(x)
        return self.tail(self.named["last"](self.fc(x)))


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(image(*shape))


def strided(net: Any) -> None:
    net.fc.weight.data = ndl.Tensor(image(6, 6)).transpose(0, 1)


def attribute(path: str, value: Callable[[], Any]) -> Callable[[Any], None]:
    *parents, name = path.split(".")

    def change(net: Any) -> None:
        for p in parents:
            net = getattr(net, p)
        setattr(net, name, value())

    return change


CHANGES: dict[str, Callable[[Any], Any]] = {
    "parameter": attribute("conv.weight", lambda: parameter(16, 4, 3, 3)),
    "parameter's data": lambda net: setattr(net.fc.weight, "data", ndl.Tensor(image(6, 6))),
    "parameter's strides": strided,
    "buffer": attribute("norm.running_mean", lambda: ndl.Tensor(image(16))),
    "eps": attribute("norm.eps", lambda: 10.0),
    "member": attribute("fc", lambda: nn.Linear(6, 6, layout="torch")),
    "sequential": attribute("tail", lambda: nn.Sequential(nn.Sigmoid())),
    "forward": attribute("fc.forward", lambda: lambda x: x),
    "hook": lambda net: net.fc.register_forward_hook(lambda m, args, out: out * 2),
    "pre-hook": lambda net: net.fc.register_forward_pre_hook(lambda m, args: args[0] * 2),
    "train and eval": lambda net: net.train().eval(),
    "float64 and back": lambda net: net.to("float64").to("float32"),
    "state": lambda net: net.load_state_dict({k: image(*v.shape) ** 2 for k, v in net.state_dict().items()}),
}
OF_MODULES: dict[str, Callable[[Any], Any]] = {  # which graphs do not follow
    "number": attribute("scale", lambda: 3.0),
    "list": lambda net: net.layers.append(nn.Conv(16, 16, 1, layout="torch")),
    "item": lambda net: net.layers.__setitem__(0, nn.Conv(16, 16, 1, layout="torch")),
    "key": lambda net: net.named.update(last=nn.Linear(6, 2, layout="torch")),
    "sequential's list": lambda net: net.tail.modules.append(nn.Sigmoid()),
    "removed": lambda net: net.layers.clear(),
    "other size": attribute("fc", lambda: nn.Linear(6, 6, layout="torch")),
}


@pytest.mark.parametrize("change", CHANGES | OF_MODULES)
@pytest.mark.parametrize("form", ["module", "function", "graph"])
def test_a_changed_model_is_seen(form: str, change: str) -> None:
    if form == "graph" and change in OF_MODULES:
        return
    net, x = Net().eval(), image(2, 4, 6, 6)
    net = symbolic(net) if form == "graph" else net
    exe = ndl.compile((lambda x: net(x)) if form == "function" else net, (x,))
    exe(x)
    for _ in range(2):
        (CHANGES | OF_MODULES)[change](net)
        for _ in range(2):
            close(exe(x), net(ndl.Tensor(x)).numpy())
            close(exe(ndl.Tensor(x)).numpy(), net(ndl.Tensor(x)).numpy())
        exe.run_into(out := np.zeros_like(exe(x)), x)
        close(out, exe(x))


def test_training_mode_is_an_error_until_it_is_left() -> None:
    net, x = Net().eval(), image(1, 4, 6, 6)
    exe = ndl.compile(net, (x,))
    before, plan = exe(x), exe.plan
    net.train()
    for _ in range(2):
        with pytest.raises(
            ValueError, match=r"^\[executable\] 1 modules are in training mode \(first: norm\); call net.eval"
        ):
            exe(x)
    net.eval()
    close(exe(x), before)
    assert exe.plan is plan  # nothing was planned again


def test_attributes_of_other_models_change_nothing() -> None:
    net, other, x = Net().eval(), Net().eval(), image(1, 4, 6, 6)
    exe = ndl.compile(net, (x,))
    plan = exe.plan
    other.scale = 5.0
    exe(x)
    assert exe.plan is plan


# -- run_into ------------------------------------------------------------------------------------------------------------


def read_only() -> np.ndarray:
    out = np.zeros((2, 3), "float32")
    out.flags.writeable = False
    return out


X = image(2, 3)
BASE = np.zeros((4, 6), "float32")
TARGETS: dict[str, tuple[Callable[[], Any], str]] = {
    "read-only": (lambda: (read_only(), BASE[2:, :3]), "output 0 is read-only"),
    "expanded": (lambda: (np.broadcast_to(BASE[0, :3], (2, 3)), BASE[2:, :3]), "output 0 is read-only"),
    "expanded torch": (lambda: (BASE[2:, :3], torch.zeros(3).expand(2, 3)), "output 1 has elements that share memory"),
    "windows": (lambda: (BASE[2:, :3], torch.zeros(4).as_strided((2, 3), (1, 1))), "output 1 has elements that share"),
    "same twice": (lambda: (BASE[:2, :3], BASE[:2, :3]), "output 1 shares memory with output 0"),
    "overlapping": (lambda: (BASE[:2, :3], BASE[:2, 1:4]), "output 1 shares memory with output 0"),
    "the input": (lambda: (X, BASE[:2, :3]), "output 0 shares memory with input 0"),
    "part of the input": (lambda: (BASE[:2, :3], torch.from_numpy(X)), "output 1 shares memory with input 0"),
    "half": (lambda: (np.zeros((2, 3), "float16"), BASE[:2, :3]), "dtype expects one of"),
    "other order": (lambda: (np.zeros((2, 3), ">f4"), BASE[:2, :3]), "native order"),
    "list": (lambda: ([[0.0] * 3] * 2, BASE[:2, :3]), "output 0 expects an array, got list"),
    "dtype": (lambda: (np.zeros((2, 3)), BASE[:2, :3]), r"output 0 expects float32 \(2, 3\), got float64"),
    "shape": (lambda: (np.zeros((3, 2), "float32"), BASE[:2, :3]), r"output 0 expects float32 \(2, 3\)"),
    "count": (lambda: BASE[:2, :3], "expects 1 inputs and 2 outputs, got 1 and 1"),
}


@pytest.mark.parametrize("case", TARGETS)
def test_run_into_refuses(case: str) -> None:
    exe = ndl.compile(lambda x: (x + 1, x * 2), (X,))
    make, error = TARGETS[case]
    with pytest.raises((TypeError, ValueError), match=rf"^\[.*{error}.*\.$"):
        exe.run_into(make(), X)


def test_run_into_refuses_parameters() -> None:
    net, x = nn.Sequential(nn.Linear(3, 3, bias=False, layout="torch")).eval(), image(3, 3)
    weight = next(iter(net.parameters()))
    before = weight.numpy().copy()
    with pytest.raises(ValueError, match=r"^\[run_into\] output 0 is a parameter or buffer of the model\.$"):
        ndl.compile(net, (x,)).run_into(weight, x)
    np.testing.assert_array_equal(weight.numpy(), before)


WHOLE = [torch.floor_divide, torch.remainder, torch.fmod, lambda a, b: torch.div(a, b, rounding_mode="trunc")]


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("divide", WHOLE, ids=["floor", "remainder", "fmod", "trunc"])
def test_plans_divide_no_integer_by_zero(divide: Callable, dtype: str) -> None:
    """Which torch refuses, too."""
    a = np.arange(-12, 12, dtype=dtype).reshape(2, 3, 4)
    divisors = [np.full(shape, 3, dtype) for shape in ((), (4,), (3, 1), (2, 3, 4))] + [np.full((4, 3), 3, dtype).T]

    class Divide(torch.nn.Module):
        def forward(self, a: Any, b: Any) -> Any:
            return divide(a, b)

    for b in divisors:
        exe = ndl.compile(torch2needle.convert(Divide(), (torch.from_numpy(a), torch.from_numpy(b))), (a, b))
        close(exe(a, b), divide(torch.from_numpy(a), torch.from_numpy(b)))
        for place in np.ndindex(b.shape):
            wrong = b.copy()
            wrong[place] = 0
            with pytest.raises(ValueError, match=r"an integer divisor expects numbers other than 0, got 0\.$"):
                exe(a, wrong)
        if not b.ndim:
            exe(a[:0], np.zeros_like(b))  # nothing is divided


@pytest.mark.parametrize(
    "outs",
    [
        lambda: (BASE[:2, :3], BASE[:2, 3:]),
        lambda: (BASE[:2, ::2], BASE[:2, 1::2]),
        lambda: (BASE[::2, :3][::-1], BASE[1::2, 2::-1]),
        lambda: (torch.zeros(3, 2).T, ndl.Tensor(np.zeros((2, 3), "float32"))),
        lambda: [torch.zeros(2, 3), BASE[1:3, 1:4]],
    ],
    ids=["beside", "interleaved", "reversed", "transposed", "list"],
)
def test_run_into_writes(outs: Callable[[], Any]) -> None:
    exe = ndl.compile(lambda x: (x + 1, x * 2), (X,))
    targets = outs()
    exe.run_into(targets, X)
    close(targets[0].numpy() if hasattr(targets[0], "numpy") else targets[0], X + 1)
    close(targets[1].numpy() if hasattr(targets[1], "numpy") else targets[1], X * 2)


# -- inputs --------------------------------------------------------------------------------------------------------------

EXACT: dict[str, Callable[[np.ndarray], Any]] = {
    "float16": lambda x: x.astype("float16"),
    "torch-float16": lambda x: torch.from_numpy(x).half(),
    "torch-bfloat16": lambda x: torch.from_numpy(x).bfloat16(),
    "torch-gradient": lambda x: torch.from_numpy(x).requires_grad_(),
    "big-endian": lambda x: x.astype(">f4"),
    "read-only": lambda x: np.broadcast_to(x, x.shape),
    "strided": lambda x: np.repeat(x, 2, 1)[:, ::2],
}
WHOLE: dict[str, Callable[[np.ndarray], Any]] = {
    "uint8": lambda x: x.astype("uint8"),
    "int16": lambda x: x.astype("int16"),
    "torch-uint8": lambda x: torch.from_numpy(x).byte(),
    "torch-int8": lambda x: torch.from_numpy(x).char(),
    "bool": lambda x: x > 0,
    "int64": lambda x: x.astype("int64"),
}


@pytest.mark.parametrize("kind", EXACT | WHOLE)
def test_inputs_are_cast_where_that_is_exact(kind: str) -> None:
    net = nn.Linear(4, 3, layout="torch")
    exe = ndl.compile(net, (image(2, 4),))
    x = (EXACT | WHOLE)[kind](np.round(np.abs(image(2, 4)) * 8) / (8 if kind in EXACT else 1))
    values = x.detach().float().numpy() if isinstance(x, torch.Tensor) else x.astype("float32")
    got = exe(x)
    assert isinstance(got, torch.Tensor if isinstance(x, torch.Tensor) else np.ndarray)
    close(got, net(ndl.Tensor(values)).numpy())


def test_a_read_only_float64_array_stays_one() -> None:
    x = np.full((1,), 1 + 1e-12)
    x.flags.writeable = False
    assert ndl.compile(lambda x: x - 1.0, (x,))(x)[0] > 0


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv(2, 3, 1, layout="torch")

    def forward(self, x: Any, scale: Any = 1.0) -> Any:
        return self.conv(x) * scale


I = image(1, 2, 4, 4)
REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "float64": (lambda exe: exe(I.astype("float64")), "conv2d has float32 weights and reads float64"),
    "uint8": (lambda exe: exe(I.astype("uint8")), "cannot run on int32"),
    "uint64": (lambda exe: exe(I.astype("uint64")), "dtype expects one of .*, got uint64"),
    "complex": (lambda exe: exe(torch.from_numpy(I).cfloat()), "expects real numbers, got complex64"),
    "object": (lambda exe: exe(I.astype(object)), "dtype expects one of .*, got object"),
    "list": (lambda exe: exe(I.tolist()), "input 0 expects an array, got list"),
    "list of arrays": (lambda exe: exe([I]), "input 0 expects an array, got list"),
    "number": (lambda exe: exe(3.0), "input 0 expects an array, got float"),
    "text": (lambda exe: exe("x"), "input 0 expects an array, got str"),
    "none": (lambda exe: exe(None), "input 0 expects an array, got NoneType"),
    "sparse": (lambda exe: exe(torch.from_numpy(I).to_sparse()), "expects a dense array in memory"),
    "meta": (lambda exe: exe(torch.from_numpy(I).to("meta")), "expects a dense array in memory"),
    "too few": (lambda exe: exe(), "missing a required argument|input x is missing"),
    "too many": (lambda exe: exe(I, 1.0, 2.0), "too many|at most 1"),
    "name": (lambda exe: exe(I, factor=2.0), "factor"),
    "rank": (lambda exe: exe(I[0, 0]), r"expects an input \(N, C, H, W\)"),
    "channels": (lambda exe: exe(I[:, :1]), "weight expects 2 input channels, got 1"),
}


@pytest.mark.parametrize("form", ["module", "graph"])
@pytest.mark.parametrize("case", REFUSED)
def test_calls_are_refused_in_a_sentence(case: str, form: str) -> None:
    net = Scaled().eval()
    exe = ndl.compile(symbolic(net) if form == "graph" else net, (I,))
    call, error = REFUSED[case]
    with pytest.raises((TypeError, ValueError), match=rf"^\[\w+\] .*({error})") as e:
        call(exe)
    assert "\n" not in str(e.value)
    close(exe(I), net(ndl.Tensor(I)).numpy())  # the executable lives on


def test_what_happened_is_logged_for_those_who_ask(caplog: pytest.LogCaptureFixture, capfd: Any) -> None:
    model, x = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU()).eval(), torch.zeros(1, 3)
    torch2needle.compile(model, (x,))
    assert caplog.text == "" and capfd.readouterr() == ("", "")
    with caplog.at_level("INFO", "needle"):
        exe = torch2needle.compile(model, (x,))
        exe(torch.zeros(2, 3))
        exe(torch.zeros(2, 3))
    converted, *planned = [r.getMessage() for r in caplog.records]
    assert re.fullmatch(r"converted Sequential by torch.fx: \d+ nodes, [\d.]+ s", converted)
    text = r"planned Sequential for float32 \[{}, 3\] on cpu\(\): 1 steps, [\d.]+ ms"
    assert len(planned) == 2 and all(re.fullmatch(text.format(n), p) for n, p in zip((1, 2), planned, strict=True))


def test_inputs_by_name() -> None:
    net = Scaled().eval()
    exe = ndl.compile(net, (I,))
    close(exe(x=I), net(ndl.Tensor(I)).numpy())
    close(exe(I, scale=2.0), 2 * net(ndl.Tensor(I)).numpy())


MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    "torch": (lambda: torch.nn.Linear(4, 3), r"got torch's; use torch2needle.compile\(model, example\)"),
    "class": (lambda: Scaled, "got the class Scaled"),
    "text": (lambda: "net", "got str"),
    "executable": (lambda: ndl.compile(Scaled().eval(), (I,)), "got Executable"),
}


@pytest.mark.parametrize("case", MODELS)
def test_models_are_refused_in_a_sentence(case: str) -> None:
    make, error = MODELS[case]
    with pytest.raises(TypeError, match=rf"^\[compile\] expects .*{error}\.$"):
        ndl.compile(make(), (I,))


def test_float64_models_run_in_float64() -> None:
    model = torch.nn.Sequential(
        torch.nn.Conv2d(2, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(16, 3)
    )
    model = model.double().eval()
    x = torch.from_numpy(I).double()
    for net in (torch2needle.convert(model), torch2needle.convert(model, (x,))):
        got = ndl.compile(net, (x,))(x)
        assert got.dtype == torch.float64
        np.testing.assert_allclose(got, model(x).detach(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", ["uint8", "int64", "bool"])
def test_an_empty_batch_of_integers_is_refused_as_a_full_one_is(dtype: str) -> None:
    exe = ndl.compile(Net().eval(), (image(1, 4, 6, 6),))
    for batch in (1, 0):
        with pytest.raises(TypeError, match=r"^\[conv2d\] cannot run on"):
            exe(np.ones((batch, 4, 6, 6), dtype))


GIVEN: dict[str, Callable[[Any], Any]] = {
    "dense": lambda x: x,
    "a parameter": lambda x: torch.nn.Parameter(x.clone()),
    "with a gradient": lambda x: x.clone().requires_grad_() * 1,
    "negated": lambda x: torch.view_as_complex(torch.stack([x, -x], -1)).conj().imag,
    "strided": lambda x: x.T.contiguous().T,
    "bfloat16": lambda x: x.bfloat16(),
    "numpy": lambda x: x.numpy(),
}


@pytest.mark.parametrize("second", ["dense", "strided", "numpy"])
@pytest.mark.parametrize("first", GIVEN)
def test_calls_after_the_first_take_and_give_what_that_does(first: str, second: str) -> None:
    """The way past DLPack is there for arrays that numpy can stand for."""
    x, y = torch.from_numpy(image(3, 4)), torch.from_numpy(image(3, 4)[::-1].copy())
    exe = ndl.compile(lambda x, y: (x * y, x > y, (x + y).sum()), (x, y))
    for _ in range(3):
        a, b = GIVEN[first](x), GIVEN[second](y)
        made = exe(a, b)
        kind = np.ndarray if first == "numpy" else torch.Tensor
        a, b = (t if isinstance(t, np.ndarray) else t.detach().resolve_neg().float().numpy() for t in (a, b))
        for got, want in zip(made, (a * b, a > b, (a + b).sum()), strict=True):
            assert isinstance(got, kind) and not getattr(got, "requires_grad", False)
            np.testing.assert_allclose(np.asarray(got), want, rtol=1e-6, atol=1e-6)


class ScaledAndMoved(torch.nn.Module):
    def forward(self, x: Any, times: float = 2.0, *, plus: Any) -> Any:
        return {"y": x * times + plus}


def test_calls_by_name_after_the_first() -> None:
    x, plus = torch.from_numpy(image(3, 4)), torch.from_numpy(image(3, 4)[::-1].copy())
    example = {"x": x, "plus": plus}
    exe = ndl.compile(torch2needle.convert(ScaledAndMoved(), example), example)
    for _ in range(3):
        close(exe(x=x, plus=plus)["y"], x * 2 + plus)
        close(exe(plus=x, x=plus)["y"], plus * 2 + x)
        close(exe(x, plus=plus)["y"], x * 2 + plus)
        with pytest.raises(TypeError, match="expects inputs x, plus, got times"):
            exe(x=x, times=3.0, plus=plus)
        with pytest.raises(TypeError, match="plus is missing"):
            exe(x=x)
        close(exe(x=x.numpy(), plus=plus)["y"], x * 2 + plus)
