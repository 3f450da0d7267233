"""torch.ops.needle.*: opcheck, values and gradients against float64 torch, layouts, torch.compile, torch.export, errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from needle import _core
from needle.ops.math.activation import CODES

if not (Path(_core.__file__).parent / "libneedle_torch.so").exists():
    pytest.skip("libneedle_torch.so is not built (NEEDLE_TORCH=1)", allow_module_level=True)
from torch2needle import torch_ops  # where the library is, its import has to work

NEEDLE, UNFUSED = torch.ops.needle, torch.ops.needle_unfused
LAST = {"memory_format": torch.channels_last}


def r(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


def variance(n: int) -> torch.Tensor:
    return torch.rand(n) + 0.3


def linear_samples() -> dict[str, tuple]:
    return {
        "few rows": (r(1, 7), r(33, 7), r(33), "gelu"),
        "rows": (r(20, 7), r(33, 7), r(33), "relu"),
        "no bias": (r(17, 5), r(3, 5), None, "tanh"),
        "three axes": (r(2, 9, 7), r(16, 7), r(16), "leaky_relu", 0.2),
        "rows apart": (r(2, 9, 14)[..., ::2], r(16, 7), r(16), "relu"),
        "axes swapped": (r(9, 4, 7).transpose(0, 1), r(5, 7), None, "none"),
        "transposed weight, strided bias": (r(18, 6), r(6, 8).t(), r(16)[::2], "relu"),
        "one axis": (r(6), r(3, 6), r(3), "sigmoid"),
        "no rows": (r(0, 6), r(3, 6), r(3), "relu"),
    }


def conv_samples() -> dict[str, tuple]:
    return {
        "batch 1": (r(1, 3, 8, 9), r(5, 3, 3, 3), r(5), (1, 1), (1, 1)),
        "odd channels, stride": (r(2, 17, 7, 8), r(19, 17, 3, 2), None, (2, 1), (1, 0)),
        "groups": (r(2, 8, 6, 6), r(12, 2, 3, 3), r(12), (1, 1), (1, 1), (1, 1), 4),
        "depthwise": (r(1, 20, 6, 6), r(20, 1, 3, 3), r(20), (1, 1), (1, 1), (1, 1), 20),
        "dilation": (r(1, 4, 9, 9), r(6, 4, 3, 3), r(6), (1, 1), (2, 0), (2, 3)),
        "channels last": (r(2, 32, 6, 5).to(**LAST), r(24, 32, 3, 3).to(**LAST), r(24), (1, 1), (1, 1)),
        "channels last, a product": (r(2, 12, 6, 5).to(**LAST), r(7, 12, 1, 1), r(7)),
        "channels last, one channel": (r(2, 3, 6, 5).to(**LAST), r(1, 3, 2, 2), None),
        "slices": (r(2, 6, 12, 9)[:, ::2, ::2, 1:], r(5, 3, 3, 6)[..., ::2], r(10)[::2]),
        "one pixel": (r(3, 40, 1, 1), r(9, 40, 1, 1), r(9)),
        "no images": (r(0, 3, 5, 5), r(4, 3, 3, 3), r(4)),
    }


def bn_samples() -> dict[str, tuple]:
    found = {}
    for name, (x, w, bias, *conv) in conv_samples().items():
        n = w.shape[0]
        found[name] = (x, w, bias, r(n), variance(n), r(n), r(n), *conv)
    n = 40  # more weights than results
    found["many weights"] = (r(1, 40, 3, 3), r(n, 40, 3, 3), r(n), r(n), variance(n), r(n), r(n), (1, 1), (1, 1))
    x, w, *rest = found["many weights"]
    found["many weights, channels last"] = (x.to(**LAST), w.to(**LAST), *rest)
    found["no weight, no bias"] = (r(2, 3, 5, 5), r(n, 3, 3, 3), None, r(n), variance(n))
    found["strided statistics"] = (r(1, 3, 4, 4), r(5, 3, 1, 1), None, r(10)[::2], variance(10)[::2], r(5), None)
    return found


def transposed_samples() -> dict[str, tuple]:
    return {
        "stride": (r(2, 5, 4, 5), r(5, 7, 3, 3), r(7), (2, 2), (1, 1), (1, 0)),
        "groups, dilation": (r(1, 8, 5, 4), r(8, 3, 2, 2), None, (1, 2), (0, 1), (0, 0), 4, (2, 1)),
        "channels last": (r(1, 16, 4, 4).to(**LAST), r(16, 20, 2, 2), r(20), (2, 2)),
    }


def norm_samples() -> dict[str, tuple]:
    return {
        "images": (r(2, 5, 4, 3), r(5), variance(5), r(5), r(5)),
        "rows": (r(6, 5), r(5), variance(5), None, None),
        "channels last": (r(2, 5, 4, 3).to(**LAST), r(5), variance(5), r(5), r(5)),
        "slices": (r(2, 5, 4, 6)[..., ::2], r(5), variance(5), r(5), None),
        "no images": (r(0, 5, 4, 3), r(5), variance(5), r(5), r(5)),
    }


def attention_samples() -> dict[str, tuple]:
    q, k, v = r(2, 3, 5, 8), r(2, 3, 7, 8), r(2, 3, 7, 16)
    merged = r(2, 6, 3, 8).transpose(1, 2)
    return {
        "plain": (q, k, v),
        "causal": (r(1, 1, 9, 5), r(1, 1, 9, 5), r(1, 1, 9, 3), None, True),
        "float mask, scale": (q, k, v, r(2, 1, 1, 7), False, 0.3),
        "bool mask, causal": (q, k, v, torch.arange(7) < 5, True),
        "heads beside each other": (merged, merged, merged),
        "two axes": (r(5, 8), r(7, 8), r(7, 4)),
    }


GENERAL: dict[str, Callable[[], dict[str, tuple]]] = {
    "linear_bias_act": linear_samples,
    "conv2d_bias_act": conv_samples,
    "conv2d_bn_act": bn_samples,
    "conv_transpose2d_bias_act": transposed_samples,
    "batch_norm_act": norm_samples,
    "attention": attention_samples,
}
RELU: dict[str, Callable[[], dict[str, tuple]]] = {
    "linear_relu": lambda: {k: v[:3] for k, v in linear_samples().items()},
    "conv2d_bias_relu": conv_samples,
    "conv2d_bn_relu": bn_samples,
    "batch_norm_relu": norm_samples,
}


def cases(table: dict[str, Any]) -> list:
    return [pytest.param(op, name, id=f"{op}-{name}") for op, make in table.items() for name in make()]


def sample(op: str, name: str) -> tuple:
    torch.manual_seed(0)
    return {**GENERAL, **RELU}[op]()[name]


def as_double(arguments: tuple) -> tuple:
    return tuple(a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in arguments)


def differentiable(op: str, arguments: tuple) -> tuple:
    """Detached copies with their strides; all but running statistics need a gradient."""
    names = [a.name for a in getattr(NEEDLE, op).default._schema.arguments]
    return tuple(
        a.detach().clone().as_strided(a.shape, a.clone().stride()).requires_grad_(not n.startswith("running"))
        if isinstance(a, torch.Tensor) and a.is_floating_point()
        else a
        for n, a in zip(names, arguments, strict=False)
    )


def error(got: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest one, relative to the largest value."""
    assert got.shape == exact.shape
    return float((got.double() - exact).abs().max()) / max(1e-30, float(exact.abs().max())) if exact.numel() else 0.0


def close(got: torch.Tensor, exact: torch.Tensor, single: torch.Tensor | None = None) -> None:
    """single: torch's own result, where a saturated activation makes small errors large ones."""
    assert error(got, exact) <= max(5e-6, 0 if single is None else 4 * error(single, exact))


def dispatched(call: Callable) -> set[str]:
    """Names of all operations that run inside `call`."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    return {event.key for event in profile.key_averages()}


def test_every_op_has_samples() -> None:
    defined = {s.name for s in torch._C._jit_get_all_schemas() if s.name.startswith("needle::")}
    assert defined == {f"needle::{name}" for name in {**GENERAL, **RELU}}
    assert {f"needle::{name}" for name in torch_ops.OPS} < defined


@pytest.mark.parametrize("op,name", cases({**GENERAL, **RELU}))
def test_values(op: str, name: str) -> None:
    """Against the unfused form in float64; kernel and unfused form give the same strides."""
    arguments = sample(op, name)
    got = getattr(NEEDLE, op)(*arguments)
    general = op.replace("_relu", "_act") if op != "linear_relu" else "linear_bias_act"
    close(got, getattr(UNFUSED, general)(*as_double(arguments)))
    double = getattr(NEEDLE, op)(*as_double(arguments))
    assert all(n == 1 or s == d for n, s, d in zip(got.shape, got.stride(), double.stride(), strict=True))


@pytest.mark.parametrize("op,name", cases(GENERAL) + [c for op in RELU for c in cases({op: RELU[op]})[:3]])
def test_opcheck(op: str, name: str) -> None:
    torch.library.opcheck(getattr(NEEDLE, op).default, differentiable(op, sample(op, name)))


@pytest.mark.parametrize("op,name", cases(GENERAL))
def test_runs_in_the_kernel(op: str, name: str) -> None:
    """Without an operation of torch that computes or copies. The exceptions are said in csrc/torch/README.md."""
    unfused = {("batch_norm_act", "channels last"), ("batch_norm_act", "slices"), ("batch_norm_act", "no images")}
    arguments = sample(op, name)
    with torch.inference_mode():
        ran = dispatched(lambda: getattr(NEEDLE, op)(*arguments))
    if (op, name) in unfused:
        assert "aten::batch_norm" in ran
    else:
        harmless = {"empty", "empty_like", "empty_strided", "transpose", "as_strided", "full", "fill_"}
        assert {k for k in ran if k.startswith("aten::")} <= {f"aten::{k}" for k in harmless}


GRADIENTS = [c for c in cases(GENERAL) if not c.values[1].startswith("no ") or c.values[1].endswith("bias")]


@pytest.mark.parametrize("op,name", GRADIENTS)
def test_gradients(op: str, name: str) -> None:
    """By finite differences, first and second order, in float64; then float32 against it."""
    torch.manual_seed(1)
    arguments = differentiable(op, as_double(sample(op, name)))
    if op.startswith("linear"):  # finite differences do not get over a kink
        arguments = (*arguments[:3], "none" if arguments[3] == "relu" else arguments[3], *arguments[4:])
    elif op != "attention":
        schema = getattr(NEEDLE, op).default._schema.arguments
        given = dict(zip([a.name for a in schema], arguments, strict=False))
        given = {a.name: given.get(a.name, a.default_value) for a in schema} | {"activation": "tanh"}
        arguments = tuple(given.values())
    f = getattr(NEEDLE, op)
    assert torch.autograd.gradcheck(f, arguments, fast_mode=True)
    if op != "attention":  # torch's own, which has no second derivative
        assert torch.autograd.gradgradcheck(f, arguments, fast_mode=True)

    def gradients(form: Callable, values: tuple) -> Any:
        values = differentiable(op, values)
        needed = [v for v in values if isinstance(v, torch.Tensor) and v.requires_grad]
        y = form(*values)
        return torch.autograd.grad((y * torch.linspace(0.5, 1, y.numel()).reshape(y.shape)).sum(), needed)

    single = tuple(
        a.detach().float() if isinstance(a, torch.Tensor) and a.dtype == torch.float64 else a for a in arguments
    )
    unfused = getattr(UNFUSED, op)
    found = (gradients(f, single), gradients(unfused, as_double(single)), gradients(unfused, single))
    for got, exact, torchs in zip(*found, strict=True):
        close(got, exact, torchs)


@pytest.mark.parametrize("activation", CODES)
def test_activations(activation: str) -> None:
    """All of needle's, with gradients, in the kernel and by torch's product for few rows."""
    for rows in (3, 20):
        arguments = (r(rows, 6), r(9, 6), r(9), activation, 0.3)
        y, exact = NEEDLE.linear_bias_act(*arguments), UNFUSED.linear_bias_act(*as_double(arguments))
        close(y, exact)
        x = arguments[0].double().requires_grad_()
        got = torch.autograd.grad(NEEDLE.linear_bias_act(x, *as_double(arguments[1:])).sum(), x)
        want = torch.autograd.grad(UNFUSED.linear_bias_act(x, *as_double(arguments[1:])).sum(), x)
        assert torch.allclose(got[0], want[0])


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.BatchNorm2d(8)
        self.up, self.head = torch.nn.ConvTranspose2d(8, 4, 2, stride=2), torch.nn.Linear(4, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        c, b = self.conv, self.bn
        y = NEEDLE.conv2d_bn_relu(x, c.weight, c.bias, b.running_mean, b.running_var, b.weight, b.bias, 1, 1)
        y = NEEDLE.batch_norm_relu(y, b.running_mean, b.running_var, b.weight, b.bias)
        y = NEEDLE.conv_transpose2d_bias_act(y, self.up.weight, self.up.bias, 2, activation="silu")
        y = y.flatten(2).transpose(1, 2)
        y = NEEDLE.linear_relu(y, self.head.weight, self.head.bias)
        return NEEDLE.attention(y, y, y, is_causal=True)


@pytest.mark.timeout(900)  # inductor calls a C++ compiler
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile(backend: str) -> None:
    """One graph, with free batch, in training and inference."""
    model, x = Block(), r(2, 3, 4, 4)
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)
    for batch in (2, 3):
        x = r(batch, 3, 4, 4)
        with torch.no_grad():
            assert torch.allclose(compiled(x), model(x), atol=1e-6)
        parameters = list(model.parameters())
        got = torch.autograd.grad(compiled(x).square().sum(), parameters)
        want = torch.autograd.grad(model(x).square().sum(), parameters)
        assert all(torch.allclose(g, w, rtol=1e-4, atol=1e-5) for g, w in zip(got, want, strict=True))


def test_export(tmp_path: Path) -> None:
    model, x = Block().eval(), r(2, 3, 4, 4)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("batch", min=1, max=64)},))
    torch.export.save(program, tmp_path / "block.pt2")
    loaded = torch.export.load(tmp_path / "block.pt2")
    targets = {str(n.target) for n in loaded.graph.nodes if n.op == "call_function"}
    assert {"needle.conv2d_bn_relu.default", "needle.attention.default"} <= targets
    x = r(5, 3, 4, 4)
    assert torch.allclose(loaded.module()(x), model(x))
    decomposed = {str(n.target) for n in loaded.run_decompositions().graph.nodes if n.op == "call_function"}
    assert "needle.conv2d_bn_act.default" in decomposed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype) -> None:
    """In float32 on the CPU, whatever comes in; outside, half dtypes run the unfused form in their own."""
    x, w, b = r(20, 6), r(5, 6), r(5)
    with torch.autocast("cpu", dtype=dtype):
        half = torch.nn.functional.linear(x, w)
        assert half.dtype == dtype
        y = NEEDLE.linear_relu(half, r(4, 5).to(dtype), None)
        assert y.dtype == torch.float32
        assert torch.equal(NEEDLE.linear_relu(x, w, b), torch.ops.needle.linear_bias_act(x, w, b))
    half = NEEDLE.linear_relu(x.to(dtype), w.to(dtype), b.to(dtype))
    assert half.dtype == dtype
    assert torch.allclose(half.float(), NEEDLE.linear_relu(x, w, b), atol=0.1)


def test_threads() -> None:
    """Those of torch, as many as torch is set to."""
    x, w, before = r(8, 64, 20, 20), r(64, 64, 3, 3), torch.get_num_threads()
    exact = UNFUSED.conv2d_bias_act(x.double(), w.double())
    try:
        for n in (1, 2, 5):
            torch.set_num_threads(n)
            close(NEEDLE.conv2d_bias_act(x, w), exact)
    finally:
        torch.set_num_threads(before)


ERRORS: dict[str, tuple[Callable[[], Any], str]] = {
    "features": (lambda: NEEDLE.linear_relu(r(5, 7), r(3, 8)), r"\[linear_bias_act\] weight expects 7 input features"),
    "bias": (lambda: NEEDLE.linear_relu(r(5, 7), r(3, 7), r(4)), r"bias expects shape \(3,\), got \(4,\)"),
    "activation": (
        lambda: NEEDLE.linear_bias_act(r(5, 7), r(3, 7), None, "swoosh"),
        "activation expects one of none, relu",
    ),
    "dtype": (lambda: NEEDLE.linear_relu(r(5, 7), r(3, 7).double()), "weight has another dtype than input"),
    "axes": (
        lambda: NEEDLE.conv2d_bias_relu(r(3, 5, 5), r(4, 3, 3, 3)),
        r"input expects 4 axes, got shape \(3, 5, 5\)",
    ),
    "channels": (lambda: NEEDLE.conv2d_bias_relu(r(1, 4, 5, 5), r(4, 3, 3, 3)), "weight expects 3 input channels"),
    "groups": (lambda: NEEDLE.conv2d_bias_relu(r(1, 4, 5, 5), r(4, 2, 3, 3), groups=3), "groups expects a divisor"),
    "kernel": (lambda: NEEDLE.conv2d_bias_relu(r(1, 3, 2, 2), r(4, 3, 3, 3)), "the kernel is larger than the padded"),
    "stride": (lambda: NEEDLE.conv2d_bias_relu(r(1, 3, 5, 5), r(4, 3, 3, 3), None, 0), "stride and dilation expect"),
    "statistics": (
        lambda: NEEDLE.batch_norm_relu(r(2, 3), r(3).requires_grad_(), variance(3)),
        "running_mean and running_var have no gradient",
    ),
    "mask": (lambda: NEEDLE.attention(r(5, 4), r(6, 4), r(6, 4), r(3, 6)), "attn_mask expects a shape that broadcasts"),
    "output padding": (
        lambda: NEEDLE.conv_transpose2d_bias_act(r(1, 3, 5, 5), r(3, 4, 3, 3), output_padding=1),
        "output_padding expects less than stride or dilation, got 1",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str, capfd: pytest.CaptureFixture) -> None:
    call, text = ERRORS[name]
    with pytest.raises(RuntimeError, match=text) as error:
        call()
    assert str(error.value).count("\n") == 0
    assert capfd.readouterr().err == ""


def test_says_what_to_do_when_not_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch_ops, "LIBRARY", tmp_path / "libneedle_torch.so")
    with pytest.raises(ImportError, match=r"\[torch_ops\] .* is not built: .*NEEDLE_TORCH=1 pip install"):
        torch_ops.load()
