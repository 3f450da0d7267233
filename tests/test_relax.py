"""`torch2needle.relax.from_fx` against torch and TVM's own frontend, and the maps that users extend."""

from __future__ import annotations

import operator
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest

tvm = pytest.importorskip("tvm")
torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch import fx, nn  # noqa: E402
from tvm import relax  # noqa: E402
from tvm.relax.frontend.torch import from_exported_program  # noqa: E402

from needle.autograd import Unsupported  # noqa: E402
from needle.tvm import build, target_of  # noqa: E402
from torch2needle import models  # noqa: E402
from torch2needle.relax import CALL_FUNCTION_MAP, from_fx  # noqa: E402


def run(module: Any, *inputs: torch.Tensor) -> list[np.ndarray]:
    vm = relax.VirtualMachine(build(module, target_of()), tvm.cpu())
    out = vm["main"](*(tvm.runtime.tensor(x.numpy()) for x in inputs))
    return [out.numpy()] if isinstance(out, tvm.runtime.Tensor) else [o.numpy() for o in out]


def translated(model: nn.Module, *inputs: torch.Tensor, **maps: Any) -> Any:
    info = [(tuple(x.shape), str(x.dtype).removeprefix("torch.")) for x in inputs]
    return from_fx(fx.symbolic_trace(model), info, **maps)


def close(got: list[np.ndarray], want: Any) -> None:
    want = want if isinstance(want, tuple | list) else [want]
    for g, w in zip(got, want, strict=True):
        w = w.detach().numpy() if isinstance(w, torch.Tensor) else w
        np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-4 * max(1e-3, np.abs(w).max()))


class Image(nn.Module):
    """Residual block, strides by keyword, pooling of all kinds, transposed convolution, padding by sizes, concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.down, self.up = nn.Conv2d(8, 8, 3, stride=2, groups=2), nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.act, self.linear = nn.SiLU(), nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> Any:
        x = F.relu(self.bn(self.conv1(x)))
        x = x + self.act(x) * 0.5
        y = self.up(F.max_pool2d(self.down(x), kernel_size=2, stride=1))
        y = F.pad(y, [0, x.size(3) - y.size(3), 0, x.shape[2] - y.shape[2]])
        y = torch.cat([x, F.avg_pool2d(y, 3, stride=1, padding=1)], dim=1)
        return self.linear(torch.flatten(F.adaptive_avg_pool2d(y, 1), 1)), y.mean(dim=(2, 3))


class Tokens(nn.Module):
    """Embedding, attention by hand, layer norm, slices."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(11, 12), nn.LayerNorm(12)
        self.qkv, self.out = nn.Linear(12, 36), nn.Linear(12, 12)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embedding(tokens))
        b, n, c = x.shape[0], x.shape[1], x.shape[2]
        q, k, v = (self.qkv(x)[..., i * c : (i + 1) * c] for i in range(3))
        q, k, v = (t.reshape(b, n, 3, c // 3).permute(0, 2, 1, 3) for t in (q, k, v))
        a = torch.softmax(q @ k.transpose(-2, -1) / (c // 3) ** 0.5, dim=-1)
        x = x + self.out((a @ v).transpose(1, 2).reshape(b, n, c))
        return F.gelu(x[:, 0], approximate="tanh").unsqueeze(1).expand(-1, 2, -1)


CASES: dict[str, tuple[Any, tuple]] = {
    "mlp": (lambda: models.mlp((20, 16, 16, 4)), (torch.randn(3, 20),)),
    "image": (Image, (torch.randn(2, 3, 11, 12),)),
    "tokens": (Tokens, (torch.randint(11, (2, 5)),)),
    "vit": (lambda: models.VisionTransformer(16, 8, 16, 2, 1), (torch.randn(2, 3, 16, 16),)),
}


@pytest.mark.parametrize("name", CASES)
def test_agrees_with_torch_and_with_tvms_frontend(name: str) -> None:
    make, inputs = CASES[name]
    torch.manual_seed(0)
    model = make().eval()
    want = model(*inputs)
    got = run(translated(model, *inputs), *inputs)
    close(got, want)
    exported = torch.export.export(model, inputs)
    close(run(from_exported_program(exported), *inputs), [torch.from_numpy(g) for g in got])


def test_float16_stays() -> None:
    model, x = models.mlp((6, 5, 3)).eval().half(), torch.randn(2, 6).half()
    (y,) = run(translated(model, x), x)
    assert y.dtype == np.float16
    np.testing.assert_allclose(y, model(x).detach().numpy(), rtol=1e-2, atol=1e-2)


# -- maps ----------------------------------------------------------------------------------------------------------------


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mish = nn.Mish()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mish(torch.special.expit(x)) + x.cos()


def test_users_add_rows() -> None:
    def expit(bb: Any, node_map: dict, node: fx.Node) -> Any:
        return bb.emit(relax.op.sigmoid(node_map[node.args[0]]))

    def cos(bb: Any, node_map: dict, node: fx.Node) -> Any:
        return bb.emit(relax.op.cos(node_map[node.args[0]]))

    def mish(bb: Any, node_map: dict, node: fx.Node, module: nn.Module) -> Any:
        assert isinstance(module, nn.Mish)
        x = node_map[node.args[0]]
        return bb.emit(relax.op.multiply(x, relax.op.tanh(relax.op.nn.softplus(x))))

    before = dict(CALL_FUNCTION_MAP)
    x = torch.randn(3, 4)
    functions: dict[Any, Any] = {torch.special.expit: expit, "cos": cos}
    module = translated(Odd(), x, call_function_map=functions, call_module_map={nn.Mish: mish})
    close(run(module, x), Odd()(x))
    assert before == CALL_FUNCTION_MAP  # the caller's rows are its own


def test_users_replace_rows_with_vendor_calls() -> None:
    def relu(bb: Any, node_map: dict, node: fx.Node, module: nn.Module) -> Any:
        x = node_map[node.args[0]]
        return bb.emit(relax.call_dps_packed("env.torch.relu", relax.Tuple([x]), out_ty=x.ty))

    model, x = models.mlp((6, 5, 3)), torch.randn(2, 6)
    module = translated(model, x, call_module_map={nn.ReLU: relu})
    assert module["main"].script().count('"env.torch.relu"') == 1
    close(run(module, x), model(x))


def test_the_converters_rules_are_the_rest() -> None:
    class Rules(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mish, self.cell, self.wide = nn.Mish(), nn.GRUCell(4, 5), nn.Linear(5, 5).double()

        def forward(self, x: torch.Tensor) -> Any:
            x = torch.add(self.mish(x), x.cumsum(0), alpha=2)
            y = self.cell(torch.where(x > 0, x, torch.zeros_like(x)))
            largest = y.max(dim=1)
            return self.wide(y.double()), largest.values, largest.indices, x[:, -1:].expand(x.size(0), 3).var(1)

    x = torch.randn(3, 4)
    model = Rules().eval()
    close(run(translated(model, x), x), model(x))


def test_what_is_unknown_is_said() -> None:
    x = torch.randn(2, 3)
    with pytest.raises(Unsupported, match=r"\[from_fx\] pool calls LPPool2d, which neither call_module_map nor a rule"):
        translated(nn.Sequential(OrderedDict(pool=nn.LPPool2d(2, 1))), torch.randn(1, 3, 4, 4))

    class Method(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.nextafter(x)

    with pytest.raises(Unsupported, match=r"call_function_map=\{'nextafter': f\}"):
        translated(Method(), x)
    with pytest.raises(ValueError, match="input_info expects 1 inputs, got 2"):
        from_fx(fx.symbolic_trace(Method()), [((2, 3), "float32")] * 2)
    for layer in (nn.BatchNorm2d(3), nn.Dropout()):
        with pytest.raises(Unsupported, match=r"call model\.eval\(\)"):
            translated(nn.Sequential(layer), torch.randn(1, 3, 4, 4))

    class Keyword(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.std(0, keepdim=True, names=None)

    with pytest.raises(Unsupported, match=r"std, std: .*names"):
        translated(Keyword(), x)


def test_rows_and_rules_share_values() -> None:
    class Shared(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            a, b = torch.split(x, 2)
            return F.relu(a) + b, torch.sort(b.exp())[0]

    def split(bb: Any, node_map: dict, node: fx.Node) -> Any:
        return relax.op.split(node_map[node.args[0]], 2, axis=0)

    def relu(bb: Any, node_map: dict, node: fx.Node) -> Any:
        return bb.emit(relax.op.nn.relu(node_map[node.args[0]]))

    x = torch.randn(4, 3)
    module = translated(Shared(), x, call_function_map={torch.split: split, F.relu: relu})
    close(run(module, x), Shared()(x))

    def refuse(bb: Any, node_map: dict, node: fx.Node) -> Any:
        raise ValueError("not this one")

    with pytest.raises(ValueError, match="not this one"):  # a row's own error is the user's
        translated(Shared(), x, call_function_map={F.relu: refuse})


def test_writes_that_are_read_later_are_refused() -> None:
    class Write(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * 2
            return F.relu(y, inplace=True) + y

    class Fine(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * 2
            y += 1
            return y.relu_()

    x = torch.randn(2, 3)
    with pytest.raises(Unsupported, match="relu writes to mul, which add reads later"):
        translated(Write(), x)
    close(run(translated(Fine(), x), x), Fine()(x))


def test_numbers_stay_numbers() -> None:
    class Sizes(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.reshape(operator.floordiv(x.shape[0], 2), -1) - x.size(1)

    x = torch.randn(4, 3)
    close(run(translated(Sizes(), x), x), Sizes()(x))
