"""Every op's samples, and models, through an ONNX file and onnxruntime, held against needle in float64 and torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

import needle as ndl  # noqa: E402
from needle import nn  # noqa: E402
from needle.autograd import OPS  # noqa: E402
from needle.onnx import to_onnx  # noqa: E402
from needle.op import Spec, Unsupported  # noqa: E402
from test_ops import OWN, assert_close, case, float32_exact, run, tensors  # noqa: E402
from values import Applied  # noqa: E402

MATRICES = ("Det", "Slogdet", "Solve", "SolveVector", "SolveTriangular", "Inverse", "Cholesky")
# Of training, or without an operator that keeps their digits: refused in a sentence.
REFUSED = (
    *(
        "TakeGrad",
        "SoftmaxGrad",
        "LogSoftmaxGrad",
        "Conv2dWeightGrad",
        "PulledBack",
        "BatchNormTrain",
        "EmbeddingGrad",
        "CrossEntropy",
        "RowNormGrad",
    ),
    *("ReducedCrossEntropy", "Erfc", "Erfinv"),
    *(name for name in OWN if not OPS[name].has_expression and name not in MATRICES),
)


def through_onnx(f: Any, path: Path, xs: list[Any], **options: Any) -> list[np.ndarray]:
    to_onnx(f, path, *xs, **options)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return session.run(None, {i.name: np.asarray(x.numpy()) for i, x in zip(session.get_inputs(), xs, strict=True)})


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, tmp_path: Path) -> None:
    op, arrays = case(name, 0)
    xs = [x.detach() for x in tensors(float32_exact(arrays), False)]
    with pytest.raises(Unsupported, match="has no operator of ONNX and does not decompose"):
        to_onnx(lambda *a: op(*a), tmp_path / "op.onnx", *xs)
    assert not (tmp_path / "op.onnx").exists()


@pytest.mark.parametrize("name", [n for n in OWN if n not in REFUSED])
def test_samples(name: str, tmp_path: Path) -> None:
    for i in range(len(OPS[name].samples())):
        op, arrays = case(name, i)
        arrays = float32_exact(arrays)
        xs = [x.detach() for x in tensors(arrays, False)]
        got = through_onnx(lambda *a: op(*a), tmp_path / "op.onnx", xs)  # noqa: B023
        specs = op.infer(*(Spec(tuple(x.shape), x.dtype) for x in xs))
        for a, b, spec in zip(got, run(op, tensors(arrays, True)), specs if op.n_out > 1 else [specs], strict=True):
            assert str(a.dtype) == spec.dtype and a.shape == tuple(spec.shape)
            assert_close(a.astype("float64"), b.numpy().astype("float64"))


def models() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    torch = pytest.importorskip("torch")
    from torch2needle import models as m

    image, large = torch.randn(2, 3, 32, 32), torch.randn(2, 3, 64, 64)
    return {
        "resnet18": (m.resnet18(), (image,)),
        "densenet121": (m.densenet121(), (image,)),
        "mobilenet_v2": (m.mobilenet_v2(), (image,)),
        "unet": (m.unet(base=8), (image,)),
        "vit": (m.vit(size=64, patch=16, width=64, heads=4, layers=2), (large,)),
        "transformer": (
            m.transformer(width=64, heads=4, layers=2, feed_forward=128),
            (torch.randint(0, 1000, (2, 12)),),
        ),
    }


@pytest.mark.parametrize("batch", ["fixed", "free"])
@pytest.mark.parametrize("name", ["resnet18", "densenet121", "mobilenet_v2", "unet", "vit", "transformer"])
def test_models(name: str, batch: str, tmp_path: Path) -> None:
    import torch

    import operator_fusion
    import torch2needle

    torch.manual_seed(0)
    model, args = models()[name]
    net = operator_fusion.fuse(torch2needle.convert(model.eval(), args))
    to_onnx(net, tmp_path / "net.onnx", *args, batch=batch)
    session = onnxruntime.InferenceSession(str(tmp_path / "net.onnx"), providers=["CPUExecutionProvider"])
    for size in (2,) if batch == "fixed" else (1, 5):
        xs = [torch.cat([a] * 3)[:size] for a in args]
        (got,) = session.run(None, {i.name: x.numpy() for i, x in zip(session.get_inputs(), xs, strict=True)})
        want = model.double()(*(x.double() if x.is_floating_point() else x for x in xs)).detach().numpy()
        assert np.abs(got - want).max() <= 1e-5 * np.abs(want).max()
    weights = {i.name for i in onnx.load(tmp_path / "net.onnx").graph.initializer}
    assert weights & set(net.state_dict())  # under torch's names


def corners() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Models of torch by what is uncommon in them, with their inputs."""
    import torch
    from torch.nn import functional as F

    class Of(torch.nn.Module):
        def __init__(self, f: Any, *layers: torch.nn.Module) -> None:
            super().__init__()
            self.f, self.layers = f, torch.nn.ModuleList(layers)

        def forward(self, *xs: torch.Tensor) -> Any:
            return self.f(self.layers, *xs)

    def assigned(_: Any, x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y[:, 0], y[1, ::2] = 1.0, x[0, ::2]
        return y

    draw, t = torch.randn, torch.nn
    whole = torch.randint(-9, 9, (3, 4))
    return {
        "lstm": (Of(lambda l, x: l[0](x), t.LSTM(4, 5, 2, batch_first=True, bidirectional=True)), (draw(2, 6, 4),)),
        "conv1d": (t.Conv1d(4, 6, 3, padding=2, dilation=2, groups=2), (draw(2, 4, 9),)),
        "conv3d": (t.Sequential(t.Conv3d(2, 4, 3), t.AvgPool3d(2, ceil_mode=True)), (draw(2, 2, 6, 7, 5),)),
        "transposed": (t.ConvTranspose2d(4, 6, 3, 2, 1, 1, groups=2, dilation=2), (draw(2, 4, 5, 6),)),
        "same": (t.Conv2d(3, 4, 4, padding="same"), (draw(2, 3, 7, 8),)),
        "reflected": (t.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"), (draw(2, 3, 7, 8),)),
        "norms": (t.Sequential(t.GroupNorm(2, 4), t.InstanceNorm2d(4, affine=True)), (draw(2, 4, 5, 5),)),
        "whole": (Of(lambda _, x: (x // 3, x % 3, x > 1, x.sum(0))), (whole,)),
        "truths": (Of(lambda _, x: (~x, x.any(1), x.sum(1), x.all())), (whole > 0,)),
        "double": (Of(lambda _, x: (x.exp(), x @ x.mT, x.softmax(-1))), (draw(3, 4, 5).double(),)),
        "order": (Of(lambda _, x: (*x.topk(2), x.cumsum(1), x.flip(1))), (draw(3, 7),)),
        "written": (Of(assigned), (draw(2, 4),)),
        "nothing": (Of(lambda _, x: x.relu() + 1), (draw(2, 0),)),
        "no axis": (Of(lambda _, x: (x * 2, x.reshape(1))), (torch.tensor(3.0),)),
        "spectrum": (Of(lambda _, x: torch.fft.rfft(x).abs()), (draw(2, 9),)),
        "columns": (Of(lambda _, x: F.unfold(x, 3, padding=1)), (draw(2, 4, 6, 6),)),
    }


@pytest.mark.parametrize(
    "name",
    [
        *("lstm", "conv1d", "conv3d", "transposed", "same", "reflected", "norms", "whole", "truths", "double", "order"),
        *("written", "nothing", "no axis", "spectrum", "columns"),
    ],
)
def test_corners(name: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    import torch2needle

    torch.manual_seed(0)
    model, args = corners()[name]
    net = torch2needle.convert(model.eval(), args)
    wide = (x.double() if x.is_floating_point() else x for x in args)
    for a, b in zip(
        through_onnx(net, tmp_path / "net.onnx", list(args)), torch_leaves(model.double()(*wide)), strict=True
    ):
        assert a.shape == tuple(b.shape) and (a.dtype == np.bool_) == (b.dtype == torch.bool)
        np.testing.assert_allclose(a, b.detach().numpy(), rtol=1e-5, atol=1e-5)


def picks() -> dict[str, tuple[Any, Any]]:
    """Functions of torch tensors in which numbers follow the batch, and what makes their arguments for one."""
    import torch

    def lasts(x: Any, ids: Any) -> Any:
        return x[torch.arange(len(x)), (ids > 0).sum(1) - 1], (x.sum((1, 2)) * len(x)).relu()

    def cut(x: Any, ids: Any) -> Any:
        both = torch.cat([x, x + 1, ids[..., None] * x])
        return both[: len(x)], both[len(x) : 2 * len(x), 1:], both[-len(x) :], both[len(x)], both[1 - len(x)]

    def of_each(x: Any, ids: Any) -> Any:
        rows = torch.arange(len(x))[:, None]
        return x[rows, ids % 3], rows + ids, torch.arange(2 * len(x) + 1) > len(x), -rows.float() / 2

    def sorted_rows(x: Any, ids: Any) -> Any:
        order = torch.argsort(ids, dim=1, stable=True)
        return torch.gather(x, 2, order[..., None, :2].expand(-1, x.shape[1], -1)), ids.gather(1, order).eq(len(x))

    def masked(x: Any, ids: Any) -> Any:
        places = torch.arange(x.shape[1])
        seen = (places[None, :, None] >= places) & ids[torch.arange(len(x))[:, None, None], places].bool()
        return (x @ x.mT).masked_fill(~seen, -1e4).softmax(-1)

    def given(batch: int) -> tuple[Any, ...]:
        return torch.randn(batch, 5, 4), torch.randint(0, 4, (batch, 5))

    def four(batch: int) -> tuple[Any, ...]:
        return torch.randn(batch, 5, 4), torch.randint(0, 4, (batch, 4))

    return {
        "lasts": (lasts, given),
        "of each": (of_each, given),
        "cut": (cut, given),
        "sorted": (sorted_rows, four),
        "masked": (masked, given),
    }


@pytest.mark.parametrize("name", ["lasts", "of each", "cut", "sorted", "masked"])
def test_numbers_that_follow_a_free_batch(name: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    import torch2needle

    class Picks(torch.nn.Module):
        def forward(self, x: Any, ids: Any) -> Any:
            return f(x, ids)

    torch.manual_seed(0)
    f, given = picks()[name]
    net = torch2needle.convert(Picks().eval(), given(4))
    net.to_onnx(tmp_path / "net.onnx", *given(4), batch="free")
    session = onnxruntime.InferenceSession(str(tmp_path / "net.onnx"), providers=["CPUExecutionProvider"])
    for batch in (1, 2, 4, 7):
        args = given(batch)
        fed = {i.name: a.numpy() for i, a in zip(session.get_inputs(), args, strict=True)}
        for a, b in zip(session.run(None, fed), torch_leaves(f(*args)), strict=True):
            np.testing.assert_allclose(a, b.numpy(), rtol=1e-5, atol=1e-6)


def exact() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Functions that gave other numbers than torch in a file, or files that no runtime opened."""
    torch = pytest.importorskip("torch")
    from torch.nn import functional as F

    nan, inf = float("nan"), float("inf")
    t = torch.tensor
    small, odd = torch.randn(1, 2, 2, 3), t([-5, 5, 3, 0, -0.0, inf, nan, -inf])
    divisors = t([0.1, -0.1, 0.1, 0.1, inf, inf, 2, 0])
    large, truths = t([2**53 + 1, 2**62 + 1, -(2**53) - 1, 7, -(2**63)]), t([True, False])
    ends = t([0.0, -0.0, 1, -1, inf, -inf, nan, 1e-40, 3e38])

    def resized(mode: str) -> Any:
        return lambda x: F.interpolate(x, scale_factor=1.3, mode=mode)

    return {
        "nearest-exact of one size": (resized("nearest-exact"), (small,)),
        "bicubic of one size": (resized("bicubic"), (small,)),
        "quotients by numbers": (lambda x: (x // 2, x // -3, x // 0, x // inf, 7 // x), (odd,)),
        "remainders by numbers": (lambda x: (x % 3, x % -3, x % 0, x % inf, torch.fmod(x, -3), 7 % x), (odd,)),
        "quotients": (lambda x, y: (x // y, x % y, x.fmod(y), torch.div(x, y, rounding_mode="trunc")), (odd, divisors)),
        "large quotients": (lambda x: (x // 3, x // -7, x // -1, torch.div(x, -3, rounding_mode="trunc")), (large,)),
        "large remainders": (lambda x: (x % 7, x % -7, x % -1, x.fmod(-7), x.fmod(2**53 + 1)), (large,)),
        "whole quotients": (lambda x, y: (x // y, x % y, x.fmod(y)), (large.int(), t([-1, 3, -3, 2, -1]).int())),
        "truths": (lambda x: (x + x, x * x, x.pow(False), x.sign(), torch.maximum(x, ~x)), (truths,)),
        "sums of truths": (lambda x: torch.einsum("ab,ac->ac", x, x), (truths[None],)),
        "no axes": (lambda x: (x.flip(0), x.roll(1), x.T, x.softmax(0), x.sort()[0], x.median()), (t(3.0),)),
        "means of nothing": (lambda x: (x.mean(), x.mean(0), x.sum(1)), (torch.zeros(0, 3),)),
        "angles": (lambda y, x: torch.atan2(y, x), (ends[:, None], ends)),
        "angles of numbers": (lambda x: torch.view_as_complex(x).angle(), (torch.randn(3, 4, 2),)),
        "shares of a permutation": (lambda a: torch.linalg.solve(torch.eye(3).roll(1, 0) + a * 0, a), (torch.randn(3, 3),)),
        "singular": (lambda a: torch.linalg.slogdet(a), (torch.zeros(2, 3, 3),)),
        "large system": (lambda a: (a.inverse(), a.det(), *torch.linalg.slogdet(a)), (torch.randn(2, 32, 32),)),
        "turned by vectors": (lambda a, v: (a.relu().T @ v, v @ a, v @ v, a[None].mT @ v), (torch.randn(4, 5), divisors[:4])),
        "one row": (lambda a: (torch.linalg.inv(a), torch.linalg.cholesky(a * a)), (torch.randn(2, 3, 1, 1),)),
        "triangles": (lambda a: torch.linalg.solve_triangular(a, a.mT, upper=False, unitriangular=True), (torch.randn(2, 4, 4),)),
    }  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        *(
            "nearest-exact of one size",
            "bicubic of one size",
            "quotients by numbers",
            "remainders by numbers",
            "quotients",
        ),
        *("large quotients", "large remainders", "whole quotients", "truths", "sums of truths", "no axes"),
        *("means of nothing", "angles", "angles of numbers", "shares of a permutation", "singular", "large system"),
        *("turned by vectors", "one row", "triangles"),
    ],
)
def test_numbers_are_torchs(name: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    import torch2needle

    class Made(torch.nn.Module):
        def forward(self, *xs: Any) -> Any:
            return f(*xs)

    torch.manual_seed(0)
    f, xs = exact()[name]
    net = torch2needle.convert(Made(), xs)
    for a, b in zip(through_onnx(net, tmp_path / "net.onnx", list(xs)), torch_leaves(f(*xs)), strict=True):
        assert a.dtype == b.numpy().dtype
        scale = max(1.0, float(b[b.isfinite()].abs().max())) if a.dtype.kind == "f" and b.isfinite().any() else 1.0
        np.testing.assert_allclose(a, b.numpy(), rtol=1e-5, atol=2e-5 * scale, equal_nan=True, strict=True)
        assert a.dtype.kind == "f" or np.array_equal(a, b.numpy())  # whole numbers to the last digit


def torch_leaves(value: Any) -> list[Any]:
    from torch.utils import _pytree

    return _pytree.tree_leaves(value)


def test_the_file_says_what_it_takes(tmp_path: Path) -> None:
    class Two(nn.Module):
        def forward(self, ids: Any, mask: Any) -> Any:
            return {"a": ids * 2, "b": (mask + ids, None, ids)}

    x = np.arange(6, dtype="float32").reshape(2, 3)
    Two().to_onnx(tmp_path / "net.onnx", x, x, batch="free")
    graph = onnx.load(tmp_path / "net.onnx").graph
    assert [i.name for i in graph.input] == ["ids", "mask"] and [o.name for o in graph.output] == [
        f"output_{i}" for i in range(3)
    ]
    assert graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"
    session = onnxruntime.InferenceSession(str(tmp_path / "net.onnx"), providers=["CPUExecutionProvider"])
    for a, b in zip(session.run(None, {"ids": x[:1], "mask": x[:1]}), (x[:1] * 2, x[:1] * 2, x[:1]), strict=True):
        np.testing.assert_array_equal(a, b)


def test_inputs_of_converted_nets_have_torchs_names(tmp_path: Path) -> None:
    """Also where a dict has them in another order; complex ones are two, whose batch is free as well."""
    torch = pytest.importorskip("torch")
    import torch2needle

    class Named(torch.nn.Module):
        def forward(self, z: Any, more: Any, last: Any) -> Any:
            return z * more["b"] + last, more["a"][0]

    def given(n: int) -> tuple[Any, ...]:
        more = {"a": [torch.arange(2.0 * n).reshape(n, 2)], "b": torch.full((n, 2), 3.0)}
        return torch.randn(n, 2, dtype=torch.cfloat), more, torch.ones(n, 2)

    net = torch2needle.convert(Named().eval(), given(3))
    z, more, last = given(3)
    net.to_onnx(tmp_path / "net.onnx", z, {"b": more["b"], "a": more["a"]}, last, batch="free")
    session = onnxruntime.InferenceSession(str(tmp_path / "net.onnx"), providers=["CPUExecutionProvider"])
    net.to_onnx(tmp_path / "named.onnx", {"last": last, "z": z, "more": more}, batch="free")
    named = onnxruntime.InferenceSession(str(tmp_path / "named.onnx"), providers=["CPUExecutionProvider"])
    for n in (1, 4):
        z, more, last = given(n)
        fed = {"z_real": z.real, "z_imag": z.imag, "more_a_0": more["a"][0], "more_b": more["b"], "last": last}
        assert {i.name: i.shape for i in session.get_inputs()} == {name: ["batch", 2] for name in fed}
        given_arrays = {k: np.ascontiguousarray(v) for k, v in fed.items()}
        got, again = (s.run(None, given_arrays) for s in (session, named))
        want = z * more["b"] + last
        for a, b in zip([*got, *again], 2 * (want.real, want.imag, more["a"][0]), strict=True):
            np.testing.assert_allclose(a, b.numpy(), rtol=1e-6)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda path: to_onnx(nn.Dropout(), path, np.zeros(3, "float32")), "training mode"),
        (lambda path: to_onnx(nn.Identity(), path, np.zeros(3, "float32"), batch="any"), "batch expects 'fixed' or 'free'"),
        (lambda path: to_onnx(lambda x: x * float(x.shape[0]), path, np.zeros((2, 3), "float32"), batch="free"), "batch sizes"),
        (lambda path: to_onnx(lambda x: (x, 3), path, np.zeros(3, "float32")), "results that are tensors"),
        (lambda path: to_onnx(Applied(ndl.ops.nonzero), path, np.ones(3, "float32")), "size depends on values"),
        (lambda path: to_onnx(ndl.ops.inv, path, np.eye(33, dtype="float32")), r"at most 32 rows, got shape \(33, 33\)\.$"),
        (lambda path: to_onnx(Applied(lambda x: ndl.ops.randn_like(x)), path, np.ones(3, "float32")), "draw has no operator"),
    ],
)  # fmt: skip
def test_refusals(make: Any, text: str, tmp_path: Path) -> None:
    with pytest.raises((ValueError, Unsupported), match=text):
        make(tmp_path / "net.onnx")
    assert not (tmp_path / "net.onnx").exists()
