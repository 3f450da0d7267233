"""A layer with what follows it as one op. It carries its unfused form in `decompose`; in training mode that form is what runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from needle.autograd import OPS, Op, Spec, Tensor, is_on, op
from needle.backend_ndarray import NDArray
from needle.backend_ndarray.kernels import call_map
from needle.ops.common import Layer
from needle.ops.fused.folded import FoldedBias, FoldedWeight
from needle.ops.linalg.basic import Linear
from needle.ops.math.activation import ACTIVATIONS, ActivationGrad, activation_op, apply_activation
from needle.ops.nn.conv import Conv2d, geometry
from needle.ops.nn.norm import BatchNorm, Positive, batch_norm, count_batch

__all__ = [
    "fused_batchnorm_relu",
    "fused_conv2d_relu",
    "fused_conv_batchnorm2d",
    "fused_conv_batchnorm2d_relu",
    "fused_linear_batchnorm",
    "fused_linear_batchnorm_relu",
    "fused_linear_relu",
]


def act_reference(name: str, alpha: float, x: np.ndarray) -> np.ndarray:
    return x if name == "none" else activation_op(name, alpha).reference(x)


def add_and_activate(out: NDArray, residual: NDArray, activation: str, alpha: float) -> None:
    """out = activation(out + residual), in place."""
    call_map("add", out, [out, residual])
    if activation != "none":
        call_map(activation, out, [out], (alpha,) if ACTIVATIONS[activation].has_alpha else ())


class Parts(NamedTuple):
    """The inputs of a FusedLayer."""

    operands: list[Any]  # x, weight, bias?
    vectors: list[Any]  # weight, bias, running mean, running variance of the batch norm, or nothing
    residual: Any
    count: Any


@op
class FusedLayer(Op):
    """activation(batch_norm(base(x, weight, bias)) + residual), each part optional.

    Inputs x, [weight, [bias] of base], [batch norm's weight, bias, running mean, running variance], [residual],
    [num_batches_tracked]. Gradient from the stored output where the activation allows it.
    """

    base: Any = None  # a Layer such as Conv2d; None: the batch norm alone
    activation: str = "none"
    alpha: float = 0.0
    eps: Any = None  # of the batch norm; None: there is none
    momentum: float = 0.1
    training: Any = False  # a bool, or a Mode that follows the batch norm's module
    unbiased: bool = False
    has_bias: bool = False
    has_residual: bool = False
    has_count: bool = False

    def checks(self) -> None:  # type: ignore[override]
        if not isinstance(self.base, Layer) and (self.base is not None or self.eps is None):
            raise ValueError(f"[fused_layer] base expects a layer such as Conv2d or Linear, got {self.base}.")
        if self.activation != "none" and self.activation not in ACTIVATIONS:
            raise ValueError(
                f"[fused_layer] activation expects one of {', '.join(ACTIVATIONS)}, got {self.activation}."
            )

    @property
    def label(self) -> str:
        parts = (self.base and self.base.label, self.eps is not None and "batch_norm", self.has_residual and "add")
        return "_".join([p for p in parts if p] + [self.activation] * (self.activation != "none"))

    @property
    def float32_only(self) -> bool:  # type: ignore[override]
        return self.base is not None and self.base.float32_only

    @property
    def has_own_gradient(self) -> bool:  # type: ignore[override]
        kept = self.activation == "none" or ACTIVATIONS[self.activation].from_output
        return kept and self.base is not None and self.eps is None and not self.has_residual

    def split(self, inputs: Any) -> Parts:
        n = 1 if self.base is None else 2 + self.has_bias
        operands, rest = list(inputs[:n]), list(inputs[n:])
        vectors = [] if self.eps is None else rest[:4]
        rest = rest[len(vectors) :]
        return Parts(operands, vectors, rest.pop(0) if self.has_residual else None, rest[0] if self.has_count else None)

    def must_decompose(self, *inputs: Any) -> bool:
        return is_on(self.training) or (self.has_residual and self._broadcasts(self.split(inputs)))

    def _broadcasts(self, parts: Parts) -> bool:
        """True where the residual is not of the layer's shape and dtype, so that only the unfused add can take it."""
        if parts.residual is None:
            return False
        residual, layer = parts.residual, self._layer(parts)
        return tuple(residual.shape) != tuple(layer.shape) or str(residual.dtype) != str(layer.dtype)

    def _layer(self, parts: Parts) -> Any:
        """The Spec of the base's result."""
        return parts.operands[0] if self.base is None else self.base.infer(*parts.operands)

    def infer(self, *inputs: Any) -> Spec:
        parts = self.split(inputs)
        out = self._layer(parts)
        if self.eps is not None:
            weight, bias, mean, var = parts.vectors
            BatchNorm(self.eps).infer(out, mean, var, weight, bias)
        if self._broadcasts(parts):
            got = f"{parts.residual.dtype} {tuple(parts.residual.shape)}"
            raise ValueError(f"[{self.label}] residual expects {out.dtype} {tuple(out.shape)}, got {got}.")
        return Spec(tuple(out.shape), str(out.dtype))

    def is_weight(self, index: int) -> bool:
        residual = (1 if self.base is None else 2 + self.has_bias) + 4 * (self.eps is not None)
        return index > 0 and not (self.has_residual and index == residual)

    def flops(self, out: Any, *inputs: Any) -> int:
        return super().flops(out) if self.base is None else self.base.flops(out, *inputs[:2])

    def compute(self, *inputs: NDArray) -> NDArray:
        parts = self.split(inputs)
        if self.eps is None and parts.residual is None:
            return self.base.finished(self.activation, self.alpha, *parts.operands)
        if self.base is None:
            return self._finish(NDArray.empty(inputs[0].shape, inputs[0].dtype), inputs[0], parts)
        out = self.base.compute(*parts.operands)
        return self._finish(out, out, parts)

    def into(self, out: NDArray, *inputs: NDArray) -> None:
        parts = self.split(inputs)
        if self.base is None:
            self._finish(out, inputs[0], parts)
        elif self.eps is None and parts.residual is None:
            self.base.into(out, *parts.operands, activation=self.activation, alpha=self.alpha)
        else:
            self.base.into(out, *parts.operands)
            self._finish(out, out, parts)

    def _finish(self, out: NDArray, x: NDArray, parts: Parts) -> NDArray:
        """Batch norm, residual and activation of x, the base's result, which may be out.

        An eager call does not fold: that would cost more than the pass over the result which it saves.
        """
        if self.eps is not None:
            weight, bias, mean, var = parts.vectors
            activation = self.activation if parts.residual is None else "none"
            BatchNorm(self.eps).into(out, x, mean, var, weight, bias, activation=activation, alpha=self.alpha)
        if parts.residual is not None:
            add_and_activate(out, parts.residual, self.activation, self.alpha)
        return out

    def folded(self, inputs: Any, apply: Callable[[Op, list[Any]], Any]) -> tuple[Op, list[Any]]:
        """The layer with its batch norm in the weights, and its inputs; apply(op, inputs) computes or records the folds."""
        parts = self.split(inputs)
        x, weight, *bias = parts.operands
        gamma, beta, mean, var = parts.vectors
        arrays = [weight, mean, var, gamma, beta, *bias]
        folds = [apply(fold(self.eps, self.base.channel_axis), arrays) for fold in (FoldedWeight, FoldedBias)]
        if self.activation == "none" and not self.has_residual:
            return self.base, [x, *folds]
        layer = dataclasses.replace(self, eps=None, has_bias=True, has_count=False)
        return layer, [x, *folds, *([] if parts.residual is None else [parts.residual])]

    def reference(self, *inputs: np.ndarray) -> np.ndarray:
        parts = self.split(inputs)
        y = inputs[0] if self.base is None else self.base.reference(*parts.operands)
        if self.eps is not None:
            weight, bias, mean, var = parts.vectors
            y = BatchNorm(self.eps).reference(y, mean, var, weight, bias)
        return act_reference(self.activation, self.alpha, y if parts.residual is None else y + parts.residual)

    def decompose(self, *inputs: Tensor) -> Tensor:
        parts = self.split(inputs)
        if self.training:
            count_batch(parts.count, inputs[0])  # as the BatchNorm layers do
        y = inputs[0] if self.base is None else self.base(*parts.operands)
        if self.eps is not None:
            weight, bias, mean, var = parts.vectors
            y = batch_norm(y, mean, var, weight, bias, self.training, self.momentum, self.eps, self.unbiased)
        return apply_activation(self.activation, y if parts.residual is None else y + parts.residual, self.alpha)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        if self.activation != "none":
            alpha = self.alpha if ACTIVATIONS[self.activation].has_alpha else None
            out_grad = ActivationGrad(self.activation, alpha)(node, out_grad)
        return self.base.gradient(out_grad, node)

    @classmethod
    def samples(cls) -> list:
        """Every layer's own samples with each way to finish, so that one more layer is tested by being one."""
        found: list = []
        for layer in every_class(Layer):
            for i, (attributes, shapes) in enumerate(layer.samples()):
                base = layer(**attributes)
                out = base.infer(*map(Spec, shapes)).shape
                fused = {"base": base, "has_bias": len(shapes) > 2, "activation": FINISHES[i % len(FINISHES)]}
                found += [(fused, shapes), ({**fused, "has_residual": True}, [*shapes, out])]
                if base.takes_norm(Spec(out)):
                    vectors = [(out[1],)] * 3 + [Positive((out[1],))]
                    found += [({**fused, "eps": 1e-5}, [*shapes, *vectors])]
                    found += [({**fused, "eps": 1e-3, "has_residual": True}, [*shapes, *vectors, out])]
        v = [(6,), (6,), (6,), Positive((6,))]
        found += [({"eps": 1e-5, "activation": a}, [(2, 6, 4, 3), *v]) for a in ("relu", "gelu")]
        found += [({"eps": 1e-5, "activation": "relu", "has_residual": True}, [(2, 6, 4, 3), *v, (2, 6, 4, 3)])]
        return [*found, ({"eps": 1e-5, "activation": "relu"}, [(4, 6), *v])]


FINISHES = ("relu", "silu", "none", "sigmoid", "gelu")


def every_class(base: type[Op]) -> list[Any]:
    """The ops below a class."""
    return [c for sub in base.__subclasses__() for c in ([sub] if sub.__name__ in OPS else every_class(sub))]


def fused_layer(
    base: Op | None,
    operands: list[Tensor | None],
    vectors: list[Tensor],
    residual: Tensor | None = None,
    **attributes: Any,
) -> Tensor:
    """A FusedLayer of x, weight, bias or None; the batch norm's weight, bias, running mean and variance; and the residual."""
    given = [t for t in (*operands, *vectors, residual) if t is not None]
    has_bias = base is not None and operands[2] is not None
    fused = FusedLayer(base, **attributes, has_bias=has_bias, has_residual=residual is not None)
    return fused(*given)


def fused_conv_batchnorm2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gamma: Tensor,
    beta: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
    training: Any = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    activation: str = "none",
    residual: Tensor | None = None,
    unbiased: bool = False,
) -> Tensor:
    """activation(batch_norm(conv2d(x)) + residual) of x (N, C, H, W), shapes as conv2d and batch_norm have them; in training it
    updates the running statistics."""
    base = Conv2d(*geometry("conv2d", 2, weight, stride, padding, dilation), groups)
    vectors = [gamma, beta, running_mean, running_var]
    norm = {"eps": eps, "momentum": momentum, "training": training, "unbiased": unbiased}
    return fused_layer(base, [x, weight, bias], vectors, residual, activation=activation, **norm)


def fused_conv_batchnorm2d_relu(*args: Any, **kwargs: Any) -> Tensor:
    """relu(batch_norm(conv2d(x))); arguments and shapes as fused_conv_batchnorm2d."""
    return fused_conv_batchnorm2d(*args, **dict(activation="relu", **kwargs))


def fused_conv2d_relu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
    residual: Tensor | None = None,
) -> Tensor:
    """relu(conv2d(x) + residual), the residual of the result's shape; other shapes as conv2d."""
    base = Conv2d(*geometry("conv2d", 2, weight, stride, padding, dilation), groups)
    return fused_layer(base, [x, weight, bias], [], residual, activation="relu")


def fused_linear_relu(x: Tensor, weight: Tensor, bias: Tensor | None = None, layout: str = "torch") -> Tensor:
    """relu(x W^T + b) of x (*, in): (*, out); weight (out, in), or (in, out) with layout="needle"."""
    return fused_layer(Linear(layout), [x, weight, bias], [], activation="relu")


def fused_linear_batchnorm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gamma: Tensor,
    beta: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    training: Any = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    activation: str = "none",
    unbiased: bool = False,
) -> Tensor:
    """batch_norm(x W^T + b) with an activation; x (N, in), weight (out, in)."""
    norm = {"eps": eps, "momentum": momentum, "training": training, "unbiased": unbiased}
    vectors = [gamma, beta, running_mean, running_var]
    return fused_layer(Linear(), [x, weight, bias], vectors, activation=activation, **norm)


def fused_linear_batchnorm_relu(*args: Any, **kwargs: Any) -> Tensor:
    """relu(batch_norm(x W^T + b)); arguments and shapes as fused_linear_batchnorm."""
    return fused_linear_batchnorm(*args, **dict(activation="relu", **kwargs))


def fused_batchnorm_relu(
    x: Tensor,
    gamma: Tensor,
    beta: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    training: Any = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    unbiased: bool = False,
) -> Tensor:
    """relu(batch_norm(x)), x (N, C, *); in training it updates the running statistics."""
    norm = {"eps": eps, "momentum": momentum, "training": training, "unbiased": unbiased}
    return fused_layer(None, [x], [gamma, beta, running_mean, running_var], activation="relu", **norm)
