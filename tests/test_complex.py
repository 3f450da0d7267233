"""Complex numbers and Fourier transforms: converted calls against torch, plain, compiled, saved and differentiated."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import needle as ndl  # noqa: E402
import torch2needle  # noqa: E402
from needle import ops  # noqa: E402
from needle.ops.fourier import table  # noqa: E402
from needle.ops.fourier.transform import Fourier, FourierToReal  # noqa: E402

TOLERANCE = 1e-5
torch.manual_seed(0)


class One(nn.Module):
    def __init__(self, f: Callable) -> None:
        super().__init__()
        self.f = f

    def forward(self, x: Any) -> Any:
        return self.f(x)


class Two(One):
    def forward(self, x: Any, y: Any) -> Any:
        return self.f(x, y)


def made(spec: Any) -> torch.Tensor:
    """(3, 4): reals; "c3,4": complex numbers; a tensor: itself."""
    if isinstance(spec, torch.Tensor):
        return spec
    if isinstance(spec, str):
        return torch.randn(*(int(n) for n in spec[1:].split(",")), dtype=torch.cfloat)
    return torch.randn(spec)


def near(ours: Any, theirs: torch.Tensor, tolerance: float = TOLERANCE) -> None:
    got, want = np.asarray(ours), theirs.detach().resolve_conj().resolve_neg().numpy()
    assert got.dtype == want.dtype and got.shape == want.shape
    same = (got == want) | (np.isnan(got) & np.isnan(want))
    scale = max(np.abs(np.where(np.isfinite(want), want, 0)).max(initial=0), 1e-30)
    apart = np.abs(np.where(same, 0, got) - np.where(same, 0, want))
    assert apart.max(initial=0) <= tolerance * scale


def leaf(x: torch.Tensor) -> Any:
    tensor = lambda t: ndl.Tensor(t.numpy(), dtype=str(t.dtype)[6:], requires_grad=t.is_floating_point())  # noqa: E731
    return ndl.Complex(tensor(x.real), tensor(x.imag)) if x.is_complex() else tensor(x)


def flat(x: Any) -> list[Any]:
    return [x.real, x.imag] if isinstance(x, ndl.Complex) or (isinstance(x, torch.Tensor) and x.is_complex()) else [x]


def gradients_agree(net: Any, f: Callable, inputs: list[torch.Tensor], tolerance: float) -> None:
    """Of a real loss: torch's gradient of a complex number is that of its real part + i that of its imaginary part."""
    theirs = [x.clone().requires_grad_(x.is_floating_point() or x.is_complex()) for x in inputs]
    ours = [leaf(x) for x in inputs]
    want, got = flat(f(*theirs)), flat(net(*ours))
    weights = [torch.randn(w.shape) for w in want]
    sum((w * v).sum() for w, v in zip(want, weights, strict=True)).backward()
    total = sum((ops.summation(g * ndl.Tensor(v.numpy())) for g, v in zip(got, weights, strict=True)), 0.0)
    total.backward()
    for mine, their in zip(ours, theirs, strict=True):
        if their.grad is None:
            continue
        parts = [p.grad for p in flat(mine)]
        for g, w in zip(parts, flat(their.grad), strict=True):
            near(np.zeros(w.shape, "float32") if g is None else g.numpy(), w, 10 * tolerance)


def agrees(f: Callable, *specs: Any, gradient: bool = True, tolerance: float = TOLERANCE, example: bool = True) -> Any:
    inputs = [made(s) for s in specs]
    model = (One if len(inputs) == 1 else Two)(f)
    net = torch2needle.convert(model, tuple(inputs) if example else None)
    want = f(*inputs)
    near(net(*inputs).numpy(), want, tolerance)
    exe = ndl.compile(net, tuple(inputs))
    got = exe(*inputs)
    assert isinstance(got, torch.Tensor) and got.dtype == want.dtype
    near(got.numpy(), want, tolerance)
    near(exe(*(x.numpy() for x in inputs)), want, tolerance)
    with tempfile.TemporaryDirectory() as folder:
        ndl.save(net, f"{folder}/net")
        near(ndl.load(f"{folder}/net")(*inputs).numpy(), want, tolerance)
    if gradient:
        gradients_agree(net, f, inputs, tolerance)
    return net


Z, W = "c3,4", "c4"
CASES: dict[str, tuple] = {
    "add a number": (lambda z: 2.5 + z + 1j, Z),
    "reals beside complex numbers broadcast": (lambda z, x: (x + z) * x - z / x, "c4", torch.rand(3, 1) + 1),
    "real by i": (lambda x: torch.exp(1j * x) * (2 - 1j), (3, 4)),
    "integers by i": (lambda x: x * 1j, torch.arange(6)),
    "products": (lambda z, w: z * w - w.conj() * 0.5, Z, W),
    "quotients": (lambda z, w: z / w + 2 / w + (1 - 2j) / w, Z, W),
    "quotient of large numbers": (lambda z, w: (z * 1e18) / (w * 1e25), Z, W),
    "powers": (lambda z: z**3 + z**-2 + z.square(), Z),
    "a broken power": (lambda z: (z + 3) ** 0.5 + (z + 3) ** 1.5, Z),
    "functions": (lambda z: torch.exp(z) + torch.log(z) * torch.sqrt(z) + torch.sin(z) - torch.cos(z), Z),
    "abs, angle": (lambda z: torch.abs(z) * torch.angle(z) + z.abs() - z.angle(), Z),
    "abs and angle at 0": (lambda z: torch.abs(z) + torch.angle(z), torch.tensor([0, 1 + 1j, -1.0, 0])),
    "sgn": (lambda z: torch.sgn(z), torch.tensor([0, 1 + 1j, -2.0])),
    "angle of reals": (lambda x: torch.angle(x), torch.tensor([-1.0, 2.0, 0.0])),
    "real, imag": (lambda z: z.real * 2 + torch.imag(z), Z),
    "polar": (lambda r, t: torch.polar(r, t), torch.rand(3, 4), (3, 4)),
    "torch.complex": (lambda a, b: torch.complex(a, b) * 1j, (3, 4), (3, 4)),
    "copies": (lambda x: torch.view_as_real_copy(torch.view_as_complex(x) * (1 + 2j)).mul_(2), (3, 4, 2)),
    "views": (lambda x: torch.view_as_real(torch.view_as_complex(x) * (1 + 2j)), (3, 4, 2)),
    "matmul": (lambda z, w: z @ w, Z, "c4,5"),
    "bmm": (lambda z, w: torch.bmm(z, w), "c2,3,4", "c2,4,2"),
    "einsum": (lambda z, w: torch.einsum("bix,iox->box", z, w), "c2,3,4", "c3,5,4"),
    "linear": (lambda z, w: nn.functional.linear(z, w), Z, "c2,4"),
    "vdot": (lambda z, w: torch.vdot(z, w), "c5", "c5"),
    "shapes": (lambda z: z.transpose(0, 1).reshape(2, -1).flip(0).unsqueeze(1)[:, 0].roll(1, 0), Z),
    "joined": (lambda z, x: torch.cat([z, x], 0), Z, (2, 4)),
    "stacked": (lambda z, w: torch.stack([z, w], -1), Z, Z),
    "pieces": (lambda z: z.chunk(2, 1)[0] * z.split(2, 1)[1], Z),
    "real sums": (lambda z: z.cumsum(1, dtype=torch.float64) + z.sum(0, dtype=torch.float32), Z),
    "whole sums": (lambda z: (z * 3).detach().cumsum(0, dtype=torch.int32) + z.real, Z),
    "norms of a dtype": (lambda z: torch.linalg.vector_norm(z, dtype=torch.complex128), Z),
    "sums": (lambda z: z.sum(1, keepdim=True) + z.mean(0) + z.cumsum(1), Z),
    "where": (lambda z, x: torch.where(x > 0, z, 0.5), Z, (3, 4)),
    "masked_fill": (lambda z, x: z.masked_fill(x > 0, 1j), Z, (3, 4)),
    "written in place": (lambda z: write(torch.zeros(3, 6, dtype=torch.cfloat), z), Z),
    "reals written in place": (lambda z: write(z * 1, z.real[:, :2]), "c3,5"),
    "operators in place": (lambda z: z.clone().mul_(2j).add_(z), Z),
    "cast": (lambda x: x.to(torch.complex64) * 1j, (3, 4)),
    "zeros_like": (lambda z: torch.zeros_like(z) + torch.ones_like(z) + z, Z),
    "equal": (lambda z: (z == z.conj()) & (z != 0), torch.tensor([1 + 1j, 2, 0])),
    "padded": (lambda z: nn.functional.pad(z, (1, 2)), Z),
    "an empty batch": (lambda z: (z * z).abs(), torch.zeros(0, 4, dtype=torch.cfloat)),
    "one number": (lambda z: z.abs() * z, torch.tensor(3 - 4j)),
    # transforms
    "fft": (lambda z: torch.fft.fft(z), "c3,12"),
    "fft of reals": (lambda x: torch.fft.fft(x, dim=0), (7, 3)),
    "fft padded": (lambda z: torch.fft.fft(z, n=16, dim=-1, norm="ortho"), "c3,12"),
    "fft trimmed": (lambda z: torch.fft.fft(z, 5, 0, "forward"), "c9,3"),
    "ifft": (lambda z: torch.fft.ifft(z, dim=1), "c2,10,3"),
    "ifft padded": (lambda z: torch.fft.ifft(z, 11, norm="forward"), "c2,10"),
    "rfft": (lambda x: torch.fft.rfft(x), (3, 9)),
    "rfft padded": (lambda x: torch.fft.rfft(x, n=14, dim=0, norm="ortho"), (9, 2)),
    "rfft trimmed": (lambda x: torch.fft.rfft(x, 6), (2, 9)),
    "irfft": (lambda z: torch.fft.irfft(z), "c3,6"),
    "irfft odd": (lambda z: torch.fft.irfft(z, n=9, norm="ortho"), "c3,6"),
    "irfft padded": (lambda z: torch.fft.irfft(z, n=20, dim=0), "c6,3"),
    "irfft trimmed": (lambda z: torch.fft.irfft(z, n=4, norm="forward"), "c3,6"),
    "irfft of reals": (lambda x: torch.fft.irfft(x), (3, 6)),
    "hfft": (lambda z: torch.fft.hfft(z, 9, norm="ortho"), "c3,5"),
    "ihfft": (lambda x: torch.fft.ihfft(x), (3, 8)),
    "fft2": (lambda z: torch.fft.fft2(z), "c2,4,6"),
    "ifft2": (lambda z: torch.fft.ifft2(z, s=(5, 4), dim=(0, -1)), "c4,2,6"),
    "rfft2": (lambda x: torch.fft.rfft2(x, dim=(1, 2), norm="ortho"), (2, 4, 5, 3)),
    "irfft2": (lambda z: torch.fft.irfft2(z, s=(4, 5), dim=(1, 2)), "c2,4,3,3"),
    "fftn": (lambda z: torch.fft.fftn(z), "c2,3,4"),
    "rfftn": (lambda x: torch.fft.rfftn(x, s=(4, -1), norm="forward"), (2, 3, 4)),
    "irfftn": (lambda z: torch.fft.irfftn(z, dim=(0, 2)), "c2,3,4"),
    "hfft2": (lambda z: torch.fft.hfft2(z), "c2,3,4"),
    "shifts": (lambda z: torch.fft.fftshift(z) + torch.fft.ifftshift(z, dim=(1,)), "c4,5"),
    "frequencies": (lambda x: torch.fft.rfft(x) * torch.fft.rfftfreq(x.shape[-1], 0.5) + torch.fft.fftfreq(9)[:5], (3, 9)),
    "one": (lambda z: torch.fft.fft(z) + torch.fft.ifft(z), "c3,1"),
    "two": (lambda x: torch.fft.irfft(torch.fft.rfft(x) * 2, 2), (3, 2)),
    "strided": (lambda z: torch.fft.fft(z[::2].transpose(0, 1)[:, ::2]), "c8,6"),
    # frames
    "stft": (lambda x: torch.stft(x, 16, 4, window=torch.hann_window(16), return_complex=True), (2, 50)),
    "stft of a row": (lambda x: torch.stft(x, 15, 7, 10, torch.hamming_window(10), normalized=True, return_complex=True), (50,)),
    "stft plain": (lambda x: torch.stft(x, 16, center=False, window=torch.ones(16), onesided=False, return_complex=True), (50,)),
    "stft with zeros around": (
        lambda x: torch.stft(x, 16, 5, window=torch.ones(16), pad_mode="constant", return_complex=True), (2, 33)),
    "istft": (lambda z: torch.istft(z, 16, 4, window=torch.hann_window(16)), "c2,9,12"),
    "istft of a row": (lambda z: torch.istft(z, 12, 3, 10, torch.hamming_window(10), normalized=True, length=33), "c7,12"),
    "istft longer": (lambda z: torch.istft(z, 8, 4, window=torch.ones(8), length=60), "c2,5,9"),
    "istft of all frequencies": (
        lambda z: torch.istft(z, 8, 4, window=torch.ones(8), onesided=False, return_complex=True), "c2,8,9"),
}  # fmt: skip


def write(base: Any, part: Any) -> Any:
    base[:, : part.shape[1]] = part
    return base


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore:.*longer than.*", "ignore:The length of signal")
def test_calls(name: str) -> None:
    f, *specs = CASES[name]
    steps = name in ("equal", "an empty batch", "integers by i")
    agrees(f, *specs, gradient=not steps, tolerance=3e-5 if name == "functions" else TOLERANCE)


FREE = {
    "there and back": (
        lambda x: torch.fft.irfft(torch.fft.rfft(x, dim=1) * 2j, n=x.size(1), dim=1),
        (3, 9, 2),
        (2, 14, 2),
    ),
    "long convolution": (
        lambda x: torch.fft.irfft(torch.fft.rfft(x, n=2 * x.size(1)) ** 2, n=2 * x.size(1)),
        (3, 9),
        (2, 10),
    ),
    "norms": (lambda x: torch.fft.ifft(torch.fft.fft(x, norm="forward"), norm="ortho").real, (3, 9), (2, 10)),
    "stft": (lambda x: sound(x, torch.istft), (2, 30), (3, 41)),
    "complex zeros": (
        lambda x: write(torch.zeros(x.size(0), x.size(1) + 1, dtype=torch.cfloat), x * 1j).abs(),
        (3, 4),
    ),
    "frequencies": (
        lambda x: torch.fft.fftfreq(x.size(1)) + torch.fft.rfftfreq(2 * x.size(1) - 1, 0.1),
        (3, 9),
        (3, 12),
    ),
}


def sound(x: Any, back: Callable) -> Any:
    options: Any = {"n_fft": 8, "hop_length": 2, "window": torch.hann_window(8)}
    return back(torch.stft(x, return_complex=True, **options), onesided=True, length=x.size(1), **options)


@pytest.mark.parametrize("name", FREE)
def test_free_sizes_without_an_example(name: str) -> None:
    f, *shapes = FREE[name]
    net = torch2needle.convert(One(f))
    for shape in shapes:
        x = torch.randn(shape)
        near(net(x).numpy(), f(x))
        near(ndl.compile(net, (x,))(x).numpy(), f(x))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 5, dtype=torch.cfloat))
        self.register_buffer("turn", torch.polar(torch.ones(5), torch.arange(5.0)))
        self.register_buffer("last", torch.zeros(5, dtype=torch.cfloat))

    def forward(self, x: Any) -> Any:
        y = (torch.view_as_complex(x) @ self.weight) * self.turn
        self.last.copy_((y[0] + self.last).detach())
        return {"y": y, "size": y.abs()}


def test_parameters_and_buffers(tmp_path: Any) -> None:
    model, x = Layer(), torch.randn(3, 4, 2)
    net = torch2needle.convert(model, (x,))
    exe = ndl.compile(net, (x,))
    for _ in range(2):
        with torch.no_grad():
            want = model(x)
        got = net(x)
        near(got["y"].numpy(), want["y"]), near(got["size"].numpy(), want["size"])
        near(torch2needle.to_torch(net)["last"], model.last)
    near(exe(x)["y"], want["y"])
    state = torch2needle.to_torch(net)
    assert state["weight"].dtype == torch.complex64 and torch.equal(state["weight"], model.weight)
    other = Layer()
    net.load_state_dict(other.state_dict())
    near(net(x)["y"].numpy(), other(x)["y"]), near(exe(x)["y"], other(x)["y"])
    ndl.save(net, tmp_path / "net")
    again = ndl.load(tmp_path / "net")
    near(again(x)["y"].numpy(), other(x)["y"])
    assert torch2needle.to_torch(again)["weight"].dtype == torch.complex64
    torch2needle.to_torch(again, model)
    assert torch.equal(model.weight, other.weight)
    with pytest.raises(ValueError, match="dtype"):
        ndl.nn.Linear(2, 3).load_state_dict({"weight": np.zeros((2, 3), complex), "bias": np.zeros((1, 3))})
    assert torch2needle.verify(model.eval(), torch2needle.convert(model, (x,)).eval(), x)


def test_training_of_complex_weights_as_torch() -> None:
    model, x = Layer(), torch.randn(3, 4, 2)
    net = torch2needle.convert(model, (x,))
    theirs, ours = torch.optim.Adam(model.parameters(), 0.1), ndl.optim.Adam(net.parameters(), 0.1)
    for _ in range(3):
        theirs.zero_grad(), ours.reset_grad()
        model(x)["size"].square().sum().backward()
        ops.summation(net(x)["size"] ** 2).backward()
        theirs.step(), ours.step()
    near(torch2needle.to_torch(net)["weight"], model.weight)


def test_borders_mirror_the_callers_kind() -> None:
    f = lambda z, x: {"z": z * x, "both": (z.conj(), x)}  # noqa: E731
    z, x = made("c3,4"), torch.randn(3, 4)
    net = torch2needle.convert(Two(f), (z, x))
    exe = ndl.compile(net, (z, x))
    numpys = exe(z.numpy(), x.numpy())
    assert isinstance(numpys["z"], np.ndarray) and numpys["z"].dtype == "complex64"
    assert exe(leaf(z), leaf(x))["z"].dtype == "complex64" and isinstance(exe(leaf(z), leaf(x))["z"], ndl.Complex)
    near(exe(z.conj(), x)["both"][0], z)
    near(exe(z[1:], x[1:])["z"], (z * x)[1:])
    near(net(x=z.numpy(), y=x)["z"].numpy(), z * x)
    out, back, same = np.zeros((3, 4), "complex64"), np.zeros((3, 4), "complex64"), np.zeros((3, 4), "float32")
    exe.run_into((out, back, same), z, x)
    near(out, z * x)
    for call in (net, exe):
        with pytest.raises(ValueError, match="input x expects complex numbers, got"):
            call(x, x)
        with pytest.raises(TypeError, match=r"expects real numbers, got complex64"):
            call(z, z)
    double = torch2needle.convert(Two(f), (z.cdouble(), x.double()))(z.cdouble(), x.double())
    assert double["z"].dtype == "complex128"


REFUSED = {
    "relu": lambda z: torch.nn.functional.relu(z),
    "softmax": lambda z: torch.softmax(z, 0),
    "max": lambda z: z.max(),
    "sort": lambda z: z.sort()[0],
    "less": lambda z: z < z,
    "clamp": lambda z: torch.clamp(z, 0, 1),
    "float": lambda z: z.float(),
    "to": lambda z: z.to(torch.float32),
    "eigenvalues": lambda z: torch.linalg.eigvals(z[:, :3]),
    "reals take no complex numbers": lambda z: write(torch.zeros(3, 4) + z.real, z),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_takes_no_complex_numbers_says_so(name: str) -> None:
    f = REFUSED[name]
    with pytest.raises(torch2needle.ConversionError, match=r"complex numbers"):
        torch2needle.convert(One(lambda x: f(torch.view_as_complex(x))))


def test_layers_refuse_complex_numbers() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, x: Any) -> Any:
            return self.layer(torch.view_as_complex(x))

    with pytest.raises(torch2needle.ConversionError, match=r"Linear takes no complex numbers"):
        torch2needle.convert(Net())


def test_ops_refuse_complex_numbers() -> None:
    z = ops.fft(ndl.Tensor(np.arange(4.0)))
    for call in (
        ops.relu,
        ops.softmax,
        ops.exp,
        lambda z: ops.maximum(z, 1.0),
        lambda z: ops.concat([z], 0),
        lambda z: ops.add(ndl.Tensor([1.0]), 1j),
    ):
        with pytest.raises(TypeError, match=r"Complex|complex"):
            call(z)
    for bad in (
        lambda: bool(z),
        lambda: ops.rfft(z),
        lambda: ops.view_as_real(z.real),
        lambda: ops.fft(z, 0),
        lambda: ops.fft(z, norm="x"),
    ):
        with pytest.raises((TypeError, ValueError), match=r"^\["):
            bad()


SIZES = (
    1,
    2,
    3,
    4,
    5,
    6,
    7,
    8,
    9,
    11,
    13,
    16,
    17,
    30,
    64,
    77,
    97,
    121,
    255,
    256,
    257,
    338,
    512,
    1000,
    1009,
    2310,
    4096,
    4099,
    5000,
    8192,
)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_transforms_of_many_sizes(dtype: str) -> None:
    rng, limit = np.random.default_rng(0), 2e-6 if dtype == "float32" else 1e-13
    tensor = lambda a: ndl.Tensor(a, dtype=dtype, requires_grad=False)  # noqa: E731

    def check(got: np.ndarray, want: np.ndarray, n: int) -> None:
        assert np.abs(got - want).max() <= limit * np.abs(want).max(), n

    for n in SIZES:
        for rows, axis in ((1, -1), (2, 0), (19, -1), (20, 0)):
            a, b = (rng.standard_normal((rows, n) if axis else (n, rows)).astype(dtype) for _ in range(2))
            z, h = a + 1j * b, n // 2 + 1
            first = (slice(None), slice(h)) if axis else slice(h)
            f = np.fft.fft(a.astype(complex), axis=axis)
            check(sum_of(Fourier(axis, n, n)(tensor(a), tensor(b))), np.fft.fft(z.astype(complex), axis=axis), n)
            check(
                sum_of(Fourier(axis, n, n, True)(tensor(a), tensor(b))),
                np.fft.ifft(z.astype(complex), axis=axis) * n,
                n,
            )
            check(sum_of(Fourier(axis, n, n)(tensor(a))), f, n)
            check(sum_of(Fourier(axis, n, h, half=True)(tensor(a))), f[first], n)
            want = np.fft.irfft(z[first].astype(complex), n, axis=axis) * n
            check(FourierToReal(axis, n, n, True)(tensor(a[first]), tensor(b[first])).numpy(), want, n)


def sum_of(parts: Any) -> np.ndarray:
    return parts[0].numpy() + 1j * parts[1].numpy()


def test_a_long_row_on_several_threads_and_strides() -> None:
    x = np.random.default_rng(0).standard_normal((2, 30000, 2)).astype("float32")
    t = ndl.Tensor(x)
    got = ops.fft(t[:, ::1, 1], n=32768).numpy()
    want = np.fft.fft(x[..., 1].astype(complex), 32768)
    assert np.abs(got - want).max() <= 2e-6 * np.abs(want).max()
    assert ops.fft(ndl.Tensor(np.zeros((0, 6)))).shape == (0, 6)


def test_tables_hold_convolutions_and_splits() -> None:
    for n in range(1, 3000, 7):
        m = table.convolution_length(n)
        assert 2 * n - 1 <= m < 4 * n and table.is_smooth(m) and m % table.split(m) == 0


@pytest.mark.parametrize(
    "name", ["products", "einsum", "written in place", "conjugates and parts", "rfft2", "stft", "istft"]
)
def test_programs_of_torch_export(name: str) -> None:
    more = {"conjugates and parts": (lambda z: z.conj().imag * z.real + torch.view_as_real(z)[..., 0], Z)}
    f, *specs = (CASES | more)[name]
    inputs = tuple(made(s) for s in specs)
    model = (One if len(inputs) == 1 else Two)(f)
    near(torch2needle.convert(torch.export.export(model, inputs, strict=False))(*inputs).numpy(), f(*inputs))


def test_parts_have_one_shape_at_other_sizes() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.randn(1, 4, dtype=torch.cfloat))

        def forward(self, x: Any) -> Any:
            return (x + self.shift).imag

    model, x = Net(), torch.randn(3, 4)
    near(torch2needle.convert(model, (x[:1],))(x).numpy(), model(x))


def test_lengths_beyond_memory_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^\[fft\] n expects at most 1099511627776, got 9223372036854775808\.$"):
        Fourier(-1, 1 << 63, 6)(ndl.Tensor(np.ones((3, 6), "float32")))
