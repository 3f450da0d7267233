"""What capture must not believe: Python's branches on tensors, hooks, modes, random numbers, state, sizes, threads."""

from __future__ import annotations

import builtins
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sympy

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402
from torch.export import Dim  # noqa: E402

import needle as ndl  # noqa: E402
import operator_fusion  # noqa: E402
import torch2needle  # noqa: E402
from fuzzing import captures as traps  # noqa: E402
from torch2needle.capture import conditions, differences  # noqa: E402

T = torch.Tensor
BASE = {"block": (["one"], 4, None, ""), "output": "tensor", "signature": "plain", "hook": None, "training": False}
FX, EXPORT, REFUSED = "agrees (torch.fx)", "agrees (torch.export)", "refused"
# What asks for sizes, dtypes or autograd's state is refused without an example and followed with one.
FOLLOWED = {
    *(
        "shape is",
        "shape above",
        "even",
        "len is",
        "grad_fn",
        "is_leaf",
        "is_cuda",
        "dtype",
        "dtype is",
        "dtype in",
        "device",
    ),
    *("ndim", "value", "caught value", "caught shape", "set attribute", "legacy type", "match shape"),
}
NEVER = {
    *(
        "caught float",
        "straight",
    ),
    *(
        "python random",
        "numpy random",
        "dropout",
        "count",
        "remember",
        "plain written",
        "norm written",
        "weight written",
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
    expected = REFUSED if step in NEVER else FX if step not in FOLLOWED else REFUSED if way == "alone" else EXPORT
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
        *((("block", ([off, "ndim"], 4, None, ""), REFUSED, EXPORT)) for off in ("inference", "no_grad")),
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
    ("steps", "signature", "training"),
    [
        ((["straight"], 1, (["is_cuda", "remember"], 2, None, "tied"), ""), "frozen", False),  # keeps what rounds to 0
        ((["training", "device", "is tensor"], 4, (["grad off", "norm"], 4, None, "tied"), ""), "plain", True),
    ],
)
def test_what_an_example_hides(steps: tuple, signature: str, training: bool) -> None:
    """Also a factor in training alone, before a normalisation."""
    assert outcome("rows", block=steps, signature=signature, training=training, batch=2) == REFUSED


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


def test_sizes_that_conditions_divide_by() -> None:
    code = compile("v0 % (v0 // 16) == 0", "condition", "eval")
    condition = conditions.Condition(code, {"v0": 32}, {"v0": "s0"}, {"v0": [8, 32, 40, 47]})
    assert [condition.holds({"v0": size}) for size in (8, 32, 40)] == [False, True, True]
    assert condition.alone() == (set(), {"s0": (16, 32)})


@pytest.mark.parametrize(
    ("text", "own", "found"),
    [
        ("v0 * 7 <= 7000", 12, (set(), {"s": (0, 1000)})),
        ("v0 * 7 >= 3500", 1000, (set(), {"s": (500, conditions.MOST)})),
        ("v0 != 128 and v0 <= 128", 12, (set(), {"s": (0, 127)})),
        ("v0 % 4 == 0", 1000, ({"s"}, {})),
        ("v0 > 1", 1000, (set(), {})),
    ],
)
def test_limits_of_conditions(text: str, own: int, found: Any) -> None:
    """Ends of the stretch of sizes around the example's, wherever they lie."""
    size = sympy.Symbol("s0")

    class Size:
        node = type("Node", (), {"hint": own, "expr": size})

        def __str__(self) -> str:
            return "s"

    guard = text.replace("v0", "L['x'].size()[0]")
    assert conditions.condition(guard, lambda place, axis: Size(), {}).alone() == found


def test_conditions_on_many_sizes_are_tried_in_time() -> None:
    names = [f"v{i}" for i in range(9)]
    code = compile(" + ".join(names) + " > 9", "condition", "eval")
    sizes, values = dict.fromkeys(names, 8), {n: list(range(2, 400)) for n in names}
    condition = conditions.Condition(code, sizes, {n: n for n in names}, values)
    assert condition.alone() == (set(), {}) and condition.together({})
    assert not condition._replace(code=compile("v0 + v8 > 9", "condition", "eval")).together({})


def test_results_of_deep_models_may_round_otherwise() -> None:
    ours, theirs = torch.tensor([1.0, 1.001]), torch.tensor([1.0, 1.0])
    assert differences.difference(ours, theirs) and not differences.difference(ours, theirs, differences.NET_TOLERANCE)


class Fivefold(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient * 5


class Rounded(torch.autograd.Function):
    """A straight-through estimator."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient


class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return (gradient * 2).clamp(-100, 100)


class NoGradient(Fivefold):
    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return None


class Swish(torch.autograd.Function):
    """What saves memory has the gradient of what it computes."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return gradient * s * (1 + x * (1 - s))


class Halved(torch.autograd.Function):
    """What it writes inside itself is kept by the ops before: torch's graph of them would refuse a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        y = torch.softmax(x, -1)
        y.mul_(0.5)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        (y,) = ctx.saved_tensors
        return y * (gradient - 2 * (y * gradient).sum(-1, keepdim=True))


class OwnGradient(nn.Module):
    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(3, 4), function

    def forward(self, x: Any) -> Any:
        return self.function.apply(self.linear(x))


@pytest.mark.parametrize("function", [Fivefold, Rounded, Clipped, NoGradient])
def test_other_gradients_than_derivatives(function: type[torch.autograd.Function]) -> None:
    assert f"gradients of its own ({function.__name__})" in refusal(OwnGradient(function), torch.randn(2, 3))


def test_other_gradients_where_nothing_takes_any() -> None:
    model, x = OwnGradient(Fivefold), torch.tensor([[1, 2, 3], [4, 5, 6]])
    model.linear = nn.Embedding(7, 4)
    assert refusal(model, x).count("convert model.requires_grad_(False)")
    net = torch2needle.convert(model.requires_grad_(False), x)
    assert (
        "the gradients of Fivefold are the derivatives of what they compute, not theirs: no parameter takes any"
        in net.report.notes
    )
    assert torch.equal(torch.from_numpy(net(x).numpy()), model(x))


@pytest.mark.parametrize("function", [Swish, Halved])
def test_gradients_that_are_derivatives(function: type[torch.autograd.Function]) -> None:
    model, x = OwnGradient(function), torch.randn(2, 3)
    net = torch2needle.convert(model, x)
    assert any(f"{function.__name__} are the derivatives" in note for note in net.report.notes)
    model(x).square().sum().backward()
    y = net(ndl.Tensor(x.numpy()))
    (y * y).sum().backward()
    grads = {n: p.grad.numpy() for n, p in net.named_parameters()}
    for name, p in model.named_parameters():
        assert p.grad is not None and np.allclose(grads[name], p.grad.numpy(), rtol=1e-5, atol=1e-6)


class AsksHowMany(nn.Module):
    def forward(self, x: Any) -> Any:
        rows = torch.where(x[:, 0] > 0)[0]
        return x + x[rows].sum(0) if rows.numel() else x


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
    text = refusal(Linear(lambda s, x: x * float(x.sum())), (torch.ones(2, 3),))
    assert "torch.fx capture: the forward's control flow depends on a tensor's value" in text
    assert "torch.export capture: the forward needs a number that values give" in text and "Could not guard" in text
    assert capfd.readouterr() == ("", "")


# -- sizes ----------------------------------------------------------------------------------------------------------------


def accepted(net: Any, sizes: range) -> list[int]:
    found = []
    for n in sizes:
        try:
            net(torch.ones(n, 3))
            found.append(n)
        except ValueError:
            pass
    return found


@pytest.mark.parametrize(
    ("batch", "step", "sizes"),
    [
        (1, lambda s, x: x.softmax(-1) if x.shape[0] == 1 else x * 2, [1]),
        (3, lambda s, x: x.softmax(-1) if x.shape[0] == 1 else x * 2, [2, 3, 4, 5, 6, 7, 8]),
        (2, lambda s, x: x * 2 if x.shape[0] != 7 else x, [1, 2, 3, 4, 5, 6]),
        (1, lambda s, x: s.linear(x).squeeze(0) if x.shape[1] > 2 else x, [1, 2, 3, 4, 5, 6, 7, 8]),
        (3, lambda s, x: s.linear(x).squeeze(0) if x.shape[1] > 2 else x, [1, 2, 3, 4, 5, 6, 7, 8]),
        (1, lambda s, x: s.linear(x) if x.shape[0] < 6 else x, [1, 2, 3, 4, 5]),
        (4, lambda s, x: s.linear(x) if x.shape[1] == 3 else x, [1, 2, 3, 4, 5, 6, 7, 8]),
    ],
    ids=["one", "not one", "seven", "squeezed", "not squeezed", "below", "any"],
)
def test_sizes_of_other_branches_are_refused(batch: int, step: Callable, sizes: list[int]) -> None:
    model = Linear(step).eval()
    net = torch2needle.convert(model, (torch.randn(batch, 3),))
    assert accepted(net, range(1, 9)) == sizes
    for n in sizes:
        x = torch.randn(n, 3)
        assert torch.allclose(torch.from_numpy(net(x).numpy()), model(x), atol=1e-6)


@pytest.mark.parametrize(
    ("dim", "sizes"),
    [(Dim("batch", min=2), [2, 3, 4, 5]), (Dim("batch", min=1), [1, 2, 3, 4, 5]), (Dim("batch", min=3, max=4), [3, 4])],
    ids=["two", "one", "three to four"],
)
def test_sizes_of_programs(dim: Any, sizes: list[int]) -> None:
    program = torch.export.export(nn.Linear(3, 3), (torch.ones(4, 3),), dynamic_shapes=({0: dim},), strict=False)
    assert accepted(torch2needle.convert(program), range(1, 6)) == sizes


# -- modes ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flag", [False, None])
def test_flags_of_functions_under_export(flag: bool | None) -> None:
    """`training=False` stays False in training mode, `training=self.training` follows."""

    def step(s: Linear, x: T) -> T:
        return F.dropout(s.linear(x), 0.5, s.training if flag is None else flag) if x.shape[1] == 3 else x

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
    assert "torch.export capture: its output 0 is off by" in refusal(model.train(), (torch.ones(2, 3),))


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


# -- a wrong rule -------------------------------------------------------------------------------------------------------------


def doubled(x: T) -> T:
    return x * 2


torch.fx.wrap("doubled")


@torch2needle.rule(doubled)
def wrong(x: Any) -> Any:
    return x * 3


def test_a_rule_that_computes_something_else_is_found() -> None:
    """The other capture goes around it, here; where none does, the model is refused."""
    model, x = Linear(lambda s, x: doubled(s.linear(x))).eval(), torch.ones(2, 3)
    net = torch2needle.convert(model, (x,))
    assert "torch.fx capture: the converted model's output 0 is off by" in net.report.capture
    assert np.allclose(net(x).numpy(), model(x).detach().numpy(), atol=1e-6)


class Volume(nn.Module):
    """The logarithm of the volume that an orthogonal matrix changes, by its diagonal: 0 but for rounding."""

    def __init__(self) -> None:
        super().__init__()
        upper = torch.linalg.lu(torch.linalg.qr(torch.randn(4, 4))[0])[2]
        self.logs = nn.Parameter(upper.diagonal().abs().log())

    def forward(self, x: T) -> T:
        return self.logs.sum().expand(x.shape[0])


def test_a_sum_that_cancels_is_as_exact_as_rounding_lets_it() -> None:
    for seed in range(4):
        torch.manual_seed(seed)
        model, x = Volume().eval(), torch.randn(3, 4)
        assert abs(torch2needle.convert(model, (x,))(x).numpy() - model(x).detach().numpy()).max() < 1e-5


def rough(x: T) -> T:
    return x * 2


torch.fx.wrap("rough")


@torch2needle.rule(rough)
def roughly(x: Any) -> Any:
    return x * 2 + 1e9 - 1e9


class Amplified(nn.Module):
    """What rounding leaves of a sum, made large: in float64 it is nothing."""

    def __init__(self, amplified: bool, step: Callable, branch: bool) -> None:
        super().__init__()
        self.amplified, self.step, self.branch = amplified, step, branch

    def forward(self, x: T, more: T) -> list[T]:
        if self.branch and more.shape[0] > 2:  # which torch.fx does not follow
            more = more + 1
        noise = (x.sum(-1) - x.flip(-1).sum(-1)) * (1e6 if self.amplified else 1)
        return [noise + more[0], self.step(more)]


@pytest.mark.parametrize("branch", [False, True])
def test_results_that_only_rounding_sets_apart(branch: bool) -> None:
    torch.manual_seed(0)
    model, given = Amplified(True, torch.tanh, branch).eval(), (torch.randn(16, 1001), torch.randn(3, 16))
    net = torch2needle.convert(model, given)
    assert any("rounding decides there" in n for n in net.report.notes)
    assert net.report.capture.startswith("torch.export" if branch else "torch.fx")
    exact = [t.double() for t in given]
    for got, want in zip(net.to("float64")(*exact), model(*exact), strict=True):
        assert np.allclose(got.numpy(), want.numpy(), atol=1e-6)


@pytest.mark.parametrize(("amplified", "step"), [(True, lambda x: doubled(x)), (False, lambda x: rough(x))])
def test_rounding_excuses_no_other_fault(amplified: bool, step: Callable) -> None:
    """Of a rule that is wrong in float64, too, or in float32 where torch is exact; torch.export goes around it."""
    given = torch.randn(16, 1001), torch.randn(3, 16)
    net = torch2needle.convert(Amplified(amplified, step, False).eval(), given)
    assert "torch.fx capture: the converted model's output" in net.report.capture


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
    kept, other = [], nn.Linear(3, 3)

    def converts(s: Linear, x: T) -> T:
        kept.append(torch.zeros)
        torch2needle.convert(other)
        return sized(s, x)

    model = Linear(converts)
    assert torch2needle.convert(model)(torch.ones(2, 3)).shape == (2, 3)
    assert names() == before
    assert type(kept[0](2, 3)) is torch.Tensor  # what the forward kept is the original for whoever calls it later
