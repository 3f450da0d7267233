"""What capture must not believe: Python's branches on tensors, hooks, modes, random numbers, state, threads."""

from __future__ import annotations

import builtins
import queue
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

import needle as ndl  # noqa: E402
import operator_fusion  # noqa: E402
import torch2needle  # noqa: E402
from fuzzing import captures as traps  # noqa: E402

T = torch.Tensor
BASE = {"block": (["one"], 4, None, ""), "output": "tensor", "signature": "plain", "hook": None, "training": False}
FX, EXPORT, REFUSED = "agrees (torch.fx)", "agrees (torch.export)", "refused"
# What asks for sizes, dtypes or autograd's state is refused without an example and followed with one.
SIZED = {
    "ndim",
    "shape is",
    "shape above",
    "len is",
    "dtype",
    "dtype is",
    "device",
    "caught shape",
    "match shape",
}  # by torch.fx
FOLLOWED = {
    *("even", "grad_fn", "is_leaf", "is_cuda", "dtype in", "ndim"),
    *("value", "caught value", "caught float", "set attribute", "legacy type"),
    *SIZED,
    *("straight", "norm written", "weight written"),
}
NEVER = {
    *(
        "python random",
        "numpy random",
        "dropout",
        "count",
        "remember",
        "plain written",
    ),
    *("value written", "set data"),
}
DRAWN = {"random", "random rows", "random like", "random ints", "filled"}  # by torch, which an example tells
WAYS = {"alone": (False, 3), "one row": (True, 1), "rows": (True, 3)}


def outcome(way: str, **parts: Any) -> str:
    example, batch = WAYS[way]
    case = BASE | {"example": example, "batch": batch} | parts
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    return traps.check(case)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("step", [s for s in traps.STEPS if s != "caught index"])
def test_steps(step: str, way: str) -> None:
    """Values of two calls at several batches and gradients, the model and torch as before; or a refusal."""
    sized = step in SIZED and (step, way) != ("caught shape", "one row")  # which holds for one row alone
    followed = REFUSED if way == "alone" else FX if sized else EXPORT
    expected = REFUSED if step in NEVER else followed if step in FOLLOWED else FX
    if step in DRAWN:
        expected = REFUSED if way == "alone" else "random in both"
    assert outcome(way, block=([step], 4, None, "")) == expected


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("part", "value", "alone", "with_example"),
    [
        *((("output", o, FX, FX)) for o in ("tuple", "list", "dict", "named", "dataclass", "size", "constant")),
        ("output", "cache", REFUSED, EXPORT),
        *((("output", o, REFUSED, REFUSED)) for o in ("item", "lists")),
        ("output", "shape", REFUSED, FX),
        *((("signature", s, FX, FX)) for s in ("masked", "mask given", "named", "frozen")),
        ("signature", "nested", REFUSED, EXPORT),
        *((("hook", (h, ""), REFUSED, EXPORT)) for h in ("forward", "pre", "silent", "own forward")),
        *((("hook", (h, "block.one"), FX, FX)) for h in ("forward", "pre", "silent", "own forward")),
        *((("hook", (h, "block.one"), REFUSED, REFUSED)) for h in ("backward", "gradient")),
        *((("block", (["one", "two"], 4, None, kind), FX, FX)) for kind in ("tied", "plain", "call")),
        *((("block", ([off, "ndim"], 4, None, ""), REFUSED, FX)) for off in ("inference", "no_grad")),
        *((("block", ([off, "is_cuda"], 4, None, ""), REFUSED, EXPORT)) for off in ("inference", "no_grad")),
    ],
    ids=lambda v: "-".join(map(str, v)) if isinstance(v, tuple) else str(v),
)
def test_forms(part: str, value: Any, alone: str, with_example: str, way: str) -> None:
    assert outcome(way, **{part: value}) == (alone if way == "alone" else with_example)


@pytest.mark.parametrize("draw", [random.random, np.random.rand])
def test_numbers_of_other_generators_that_make_nothing(draw: Callable) -> None:
    model = Linear(lambda m, x: m.linear(x) + 0 * float(draw()))
    assert "draws Python's or numpy's random numbers" in refusal(model, torch.ones(2, 3))


@pytest.mark.parametrize(
    ("steps", "signature", "training", "expected"),
    [
        (
            (["straight"], 1, (["is_cuda", "remember"], 2, None, "tied"), ""),
            "frozen",
            False,
            REFUSED,
        ),  # keeps what rounds to 0
        ((["training", "device", "is tensor"], 4, (["grad off", "norm"], 4, None, "tied"), ""), "plain", True, FX),
    ],
)
def test_what_an_example_hides(steps: tuple, signature: str, training: bool, expected: str) -> None:
    """Also a factor in training alone, before a normalisation."""
    assert outcome("rows", block=steps, signature=signature, training=training, batch=2) == expected


class Linear(nn.Module):
    def __init__(self, step: Callable | None = None) -> None:
        super().__init__()
        self.linear, self.step = nn.Linear(3, 3), step

    def forward(self, x: T) -> Any:
        return self.linear(x) if self.step is None else self.step(self, x)


def refusal(model: Any, *example: Any) -> str:
    with pytest.raises(torch2needle.Unsupported) as caught:
        torch2needle.convert(model, *example)
    report = getattr(caught.value, "report", None)
    return str(caught.value) if report is None else " | ".join(f"{r.op}: {r.reason}" for r in report.unsupported)


# -- hooks and modules that no capture sees ----------------------------------------------------------------------------------


def test_hooks_of_all_modules_are_refused() -> None:
    handle = nn.modules.module.register_module_forward_hook(lambda m, i, o: o * 2)
    try:
        assert "expects no hooks for all modules" in refusal(Linear())
        assert not torch2needle.check(Linear(), torch.ones(2, 3)).ok
    finally:
        handle.remove()
    assert torch2needle.check(Linear(), torch.ones(2, 3)).ok


class AsksHowMany(nn.Module):
    def forward(self, x: Any) -> Any:
        rows = torch.where(x[:, 0] > 0)[0]
        for i in range(rows.numel()):
            x = x + x[rows[i]]
        return x


def test_how_many_is_no_answer() -> None:
    said = refusal(AsksHowMany(), torch.ones(3, 2))
    assert "needs a number that values give" in said and "fallback='torch'" in said and "unhinted" not in said


class Asks(nn.Module):
    def forward(self, x: Any) -> Any:
        return x - 1 if torch.overrides.has_torch_function((x,)) else x + 1


def test_what_an_example_shows() -> None:
    assert refusal(Asks(), torch.ones(1, 2))


def test_conversion_leaves_out_the_compiler_of_torch() -> None:
    """Whose import takes a second."""
    code = """
import sys, torch, torch2needle
net = torch2needle.convert(torch.nn.Linear(3, 2), torch.ones(1, 3))
assert net.report.capture == "torch.fx" and "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def batched(f: Callable) -> Callable:
    return lambda x: torch.vmap(f)(x)


@pytest.mark.parametrize(
    ("model", "example", "text"),
    [
        (nn.Linear(3, 3), torch.ones(2, 3).to_sparse(), "expects a dense tensor for the example, got a sparse_coo one"),
        (
            nn.Linear(3, 3),
            torch.ones(2, 3, device="meta"),
            "expects values for the example, got a tensor on the meta device",
        ),
        (
            nn.Linear(3, 3, device="meta"),
            torch.ones(2, 3),
            "expects values for weight, got a tensor on the meta device",
        ),
        (nn.ReLU(), torch.ones(2, 3) + 0j, "clamp is not supported for complex types"),
        (
            nn.Linear(3, 3),
            torch.ones(2, 3).bfloat16(),
            "expects an example that the model takes: RuntimeError: mat1 and mat2",
        ),
    ],
    ids=["sparse", "meta", "meta weights", "complex", "half"],
)
def test_sentences(model: nn.Module, example: T, text: str) -> None:
    assert text in refusal(model, (example,))


def test_inside_vmap() -> None:
    model = nn.Linear(3, 3)
    with pytest.raises(torch2needle.Unsupported, match=r"got one inside torch\.vmap"):
        torch.vmap(lambda x: torch2needle.convert(model, (x,)))(torch.ones(2, 3, 3))


def test_both_blockers_are_shown_and_torch_prints_nothing(capfd: Any) -> None:
    text = refusal(Linear(lambda s, x: x * x.sum().__float__()), (torch.ones(2, 3),))
    assert "no other input answers `text = refusal(Linear(lambda s, x: x * x.sum().__float__())" in text
    assert capfd.readouterr() == ("", "")


# -- modes ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flag", [False, None])
def test_flags_of_functions_under_export(flag: bool | None) -> None:
    """`training=False` stays False in training mode, `training=self.training` follows."""

    def step(s: Linear, x: T) -> T:  # an attribute of which torch.fx does not know
        return x if x.is_cuda else F.dropout(s.linear(x), 0.5, s.training if flag is None else flag)

    net = torch2needle.convert(Linear(step).eval(), torch.ones(2, 3))
    assert net.report.capture.startswith("torch.export")
    zeros = net.train()(torch.ones(99, 3)).numpy() == 0
    assert zeros.any() == (flag is None) and not zeros.all()


def test_a_branch_on_the_mode_is_told() -> None:
    model = Linear(lambda s, x: s.linear(x) * (3 if s.training else 1) if x.shape[1] == 3 else x).eval()
    assert any(
        "differs between training and evaluation" in n
        for n in torch2needle.convert(model, torch.ones(2, 3)).report.notes
    )
    net, x = torch2needle.convert(model.train(), torch.ones(2, 3)), torch.randn(4, 3)
    assert any("train() and eval() choose" in n for n in net.report.notes)
    for mode in (True, False):
        want = model.train(mode)(x).detach().numpy()
        np.testing.assert_allclose(net.train(mode)(x).numpy(), want, rtol=1e-5, atol=1e-6)


# -- weights ----------------------------------------------------------------------------------------------------------------


def without_parameter(layer: nn.Module, name: str) -> nn.Module:
    tensor = getattr(layer, name).detach().clone()
    delattr(layer, name)
    setattr(layer, name, tensor)
    return nn.Sequential(layer, nn.ReLU()).eval()


def hidden_statistics() -> nn.Module:
    layer = nn.BatchNorm1d(3)
    layer.running_mean.fill_(2.0)
    layer._non_persistent_buffers_set.update(("running_mean", "running_var"))
    return nn.Sequential(layer).eval()


class Containers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.plain, self.listed, self.table = torch.randn(3), [torch.randn(3, 3)], {"k": [torch.randn(3)]}

    def forward(self, x: T) -> T:
        return x @ self.listed[0] * self.plain + self.table["k"][0]


class PlainList(nn.Module):
    """Layers that torch does not know of: no nn.ModuleList."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.others = nn.Linear(3, 3), [nn.Linear(3, 3), nn.BatchNorm1d(3).eval()]
        self.weights = [nn.Parameter(torch.randn(3))]

    def forward(self, x: T) -> T:
        for layer in self.others:
            x = layer(self.first(x))
        return x * self.weights[0]


def test_parameters_that_are_not_registered() -> None:
    model, x = PlainList().eval(), torch.randn(2, 3)
    net = torch2needle.convert(model, (x,))
    assert any("constants" in n for n in net.report.notes)
    ((net(x) ** 2).sum()).backward()
    (model(x) ** 2).sum().backward()
    for name, p in model.named_parameters():
        assert np.allclose(dict(net.named_parameters())[name].grad.numpy(), p.grad.numpy(), rtol=1e-4, atol=1e-5)
    assert {n for n, _ in net.named_parameters()} == {n for n, _ in model.named_parameters()}
    y = torch.randn(4, 3)
    assert np.allclose(net(y).numpy(), model(y).detach().numpy(), atol=1e-5)


@pytest.mark.parametrize("with_example", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        Containers,
        hidden_statistics,
        *(lambda n=n: without_parameter(nn.Linear(3, 3), n) for n in ("weight", "bias")),
        lambda: without_parameter(nn.LayerNorm(3), "weight"),
    ],
    ids=["containers", "statistics", "weight", "bias", "norm"],
)
def test_weights_that_are_no_parameters(make: Callable, with_example: bool, tmp_path: Path) -> None:
    model, x = make(), torch.randn(2, 3)
    net = torch2needle.convert(model, *((x,),) * with_example)
    ndl.save(net, tmp_path / "net.safetensors")
    forms = [
        net,
        ndl.compile(net, (x,)),
        ndl.compile(operator_fusion.fuse(net), (x,)),
        ndl.load(tmp_path / "net.safetensors"),
    ]
    for form in forms:
        got = form(x)
        assert np.allclose(got.numpy(), model(x).detach().numpy(), atol=1e-5)


@pytest.mark.parametrize("with_example", [False, True])
@pytest.mark.parametrize("product", [torch.spmm, torch.sparse.mm, torch.mm, torch.matmul])
def test_sparse_neighbours(product: Callable, with_example: bool) -> None:
    model, x = Linear(lambda s, x: product(s.near, s.linear(x)) + s.far.t() @ x), torch.randn(5, 3)
    model.register_buffer("near", (torch.rand(5, 5) > 0.5).float().to_sparse())
    model.far = torch.rand(5, 5).relu().to_sparse()
    net = torch2needle.convert(model, *((x,),) * with_example)
    assert model.near.is_sparse and "sparse tensors are dense in the net: near, far" in net.report.notes
    assert np.allclose(net(x).numpy(), model(x).detach().numpy(), atol=1e-5)
    torch2needle.to_torch(net, model)
    assert model.near.is_sparse


class Residual(nn.Module):
    def forward(self, x: T) -> T:
        for _ in range(40):
            y = x * 0.5
            x = (x + torch.relu(y) if isinstance(y, torch.Tensor) else y) * 1.0
            x.add_(0.1)
        return x


def test_many_paths_through_a_graph_are_walked_once() -> None:
    """Two paths at each of forty steps: asking each for its dtype or type would never end."""
    model, x = Residual(), torch.rand(2, 3)
    assert np.allclose(torch2needle.convert(model)(x).numpy(), model(x).numpy(), rtol=1e-5)


# -- threads, errors, re-entrancy ----------------------------------------------------------------------------------------------


def sized(s: Linear, x: T) -> T:
    return s.linear(x) + torch.zeros(x.size(0), 3) * len(x)


def names() -> list[Any]:
    module, tensor = nn.Module, torch.autograd.Function
    return [
        torch.zeros,
        torch.is_tensor,
        module.__call__,
        module.__getattr__,
        vars(tensor)["apply"],
        "len" in globals(),
        len,
    ]


def test_threads() -> None:
    """Conversions in several threads; another one runs torch meanwhile and sees nothing of them."""
    before, wrong, done = names(), list[str](), threading.Event()
    model, x = Linear(sized).eval(), torch.randn(4, 3)
    want = model(x)

    def run() -> None:
        while not done.is_set():
            if (
                not torch.equal(model(x), want)
                or type(torch.zeros(2)) is not torch.Tensor
                or not isinstance(len([1]), int)
            ):
                wrong.append("torch")

    def convert() -> None:
        for example in ((), ((x,),)):
            net = torch2needle.convert(Linear(sized).eval(), *example)
            if net(x).shape != (4, 3):
                wrong.append("net")

    threads = [threading.Thread(target=convert) for _ in range(4)]
    user = threading.Thread(target=run)
    for t in (user, *threads):
        t.start()
    for t in threads:
        t.join()
    done.set()
    user.join()
    assert not wrong and names() == before and len is builtins.len


def test_a_forward_that_fails_or_converts() -> None:
    before = names()

    def fails(s: Linear, x: T) -> T:
        torch.zeros(x.size(0))
        raise KeyError("no such thing")

    assert "no such thing" in refusal(Linear(fails))
    kept, other = queue.SimpleQueue(), nn.Linear(3, 3)  # a list would be put back

    def converts(s: Linear, x: T) -> T:
        kept.put(torch.zeros)
        torch2needle.convert(other)
        return sized(s, x)

    model = Linear(converts)
    assert torch2needle.convert(model)(torch.ones(2, 3)).shape == (2, 3)
    assert names() == before
    assert (
        type(kept.get_nowait()(2, 3)) is torch.Tensor
    )  # what the forward kept is the original for whoever calls it later
