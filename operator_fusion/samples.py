"""A small net with one match for every fusion; what the generic test runs."""

from __future__ import annotations

from collections.abc import Callable

from needle import nn, ops
from needle.autograd import Tensor
from needle.ops.math.activation import Activation, apply_activation


class Apply(nn.Module):
    """The functional spelling of an activation, for those that have no layer."""

    container = True

    def __init__(self, kernel: str) -> None:
        super().__init__()
        self.kernel = kernel

    def forward(self, x: Tensor) -> Tensor:
        return apply_activation(self.kernel, x, 0.3)


def sample(
    layer: Callable[[bool], nn.Module] | None, parts: tuple[str, ...], cls: type[Activation] | None
) -> Callable[[], tuple[nn.Module, tuple[int, ...]]]:
    """A net with one match: the layer of `parts`, made with or without bias, if there is one; bn, add; then the activation."""

    def build() -> tuple[nn.Module, tuple[int, ...]]:
        image = parts[0] != "linear"
        layers = [] if layer is None else [layer("bn" not in parts)]
        if "bn" in parts:
            layers.append(nn.BatchNorm2d(4, count_batches=True) if image else nn.BatchNorm1d(4))
        net: nn.Module = nn.Sequential(*layers)
        if "add" in parts:
            net = nn.Residual(net)
        if cls is not None:
            made = getattr(nn, cls.__name__, None)
            net = nn.Sequential(net, made() if made else Apply(str(cls.kernel)))
        return net, (3, 4, 6, 5) if image else (6, 4)

    return build


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ops.matmul(ops.softmax(ops.matmul(q, ops.transpose(k)) / 2.0, -1), v)


class AttentionSample(nn.Module):
    """Self-attention written out, as in many code bases."""

    container = True

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(8, 8, layout="torch") for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        n, length = x.shape[0], x.shape[1]
        heads = [ops.transpose(ops.reshape(p(x), (n, length, 2, 4)), (1, 2)) for p in (self.q, self.k, self.v)]
        return self.out(ops.reshape(ops.transpose(attend(*heads), (1, 2)), (n, length, 8)))


class CoreSample(nn.Module):
    """Attention of an input to itself, without projections."""

    container = True

    def forward(self, x: Tensor) -> Tensor:
        return attend(x, x + 1.0, x * 2.0)


class Siblings(nn.Module):
    """Two linear layers of one input, multiplied."""

    container = True

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 5, layout="torch"), nn.Linear(6, 5, layout="torch")

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * self.b(x)
