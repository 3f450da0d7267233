"""Rules of complex numbers that are made of products of real ones: matrices, vectors, convolutions."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from needle import ops
from needle.complex_numbers import Complex
from needle.ops.fourier import complex as numbers

from . import arithmetic, convolution, layers, matrices
from .complex_numbers import from_real, whole
from .registry import complex_rule

LOADED = (arithmetic, convolution, layers, matrices)  # whose rules are taken below
T, L, aten = torch.Tensor, torch.linalg, torch.ops.aten


def linear_in(names: str, *targets: Any, bias_axes: int = 0) -> None:
    """The rule of real numbers, which is linear in each argument of these names, for every choice of parts.

    A bias (C,) is added behind, before so many axes.
    """
    from_real(lambda f: of_products(f, names.split(), bias_axes), *targets)


def of_products(f: Callable, names: list[str], bias_axes: int) -> Callable:
    signature = inspect.signature(f)

    def convert(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        bias = given.arguments.pop("bias", None)
        factors = [given.arguments.pop(n) for n in names]
        y = ops.multilinear(lambda *xs: f(**dict(zip(names, xs, strict=True)), **given.arguments), *factors)
        if bias is None:
            return y
        return numbers.complex_add(y, whole(bias).map(lambda b: ops.reshape(b, (-1, *(1,) * bias_axes))))

    return convert


linear_in(
    "input other",
    *(torch.matmul, L.matmul, T.matmul, operator.matmul, operator.imatmul, torch.inner, T.inner, torch.kron, T.kron),
    *(torch.cross, T.cross, L.cross),
)
linear_in("input mat2", torch.mm, T.mm, torch.bmm, T.bmm)
linear_in("input vec", torch.mv, T.mv)
linear_in("input tensor", torch.dot, T.dot)
linear_in("input vec2", torch.outer, torch.ger, T.outer, T.ger)
linear_in("a b", torch.tensordot)
linear_in("input other", aten.tensordot.default)
linear_in("input weight", F.linear)
linear_in("input1 input2 weight", F.bilinear)
for _axes in (1, 2, 3):
    for _kind in ("conv", "conv_transpose"):
        linear_in("input weight", *(getattr(place, f"{_kind}{_axes}d") for place in (F, torch)), bias_axes=_axes)

complex_rule(torch.vdot, T.vdot)(lambda input, other: ops.multilinear(ops.matmul, ops.conj(input), other))


@complex_rule(torch.einsum)
def einsum(equation: str, *operands: Any, path: Any = None) -> Any:
    many = operands[0] if len(operands) == 1 and isinstance(operands[0], list | tuple) else operands
    return numbers.complex_einsum(equation, *many)


@complex_rule(L.vecdot)
def vecdot(x: Any, y: Any, *, dim: int = -1) -> Any:
    return whole(ops.conj(x) * y).map(lambda p: ops.summation(p, dim))


@complex_rule(L.multi_dot)
def multi_dot(tensors: Any) -> Any:
    return functools.reduce(numbers.complex_matmul, tensors)


@complex_rule(torch.chain_matmul)
def chain_matmul(*matrices: Any) -> Any:
    return multi_dot(matrices[0] if isinstance(matrices[0], tuple | list) else matrices)


def outer(a: Any, b: Any) -> Complex:
    return whole(a).map(lambda p: ops.unsqueeze(p, 1)) * b


def summed_matmul(a: Any, b: Any) -> Complex:
    return numbers.complex_matmul(a, b).map(lambda p: ops.summation(p, 0))


def added(product: Callable[[Any, Any], Complex]) -> Callable[[Callable], Callable]:
    """beta input + alpha product(first, second); with beta 0 the input plays no part."""

    def with_arguments_of(f: Callable) -> Callable:
        signature = inspect.signature(f)

        def convert(*args: Any, **kwargs: Any) -> Complex:
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            input, first, second, beta, alpha = given.arguments.values()
            y = product(first, second) * alpha
            return y if beta == 0 else numbers.complex_add(y, whole(input) * beta)

        return convert

    return with_arguments_of


from_real(added(numbers.complex_matmul), torch.addmm, T.addmm, torch.baddbmm, T.baddbmm, torch.addmv, T.addmv)
from_real(added(summed_matmul), torch.addbmm, T.addbmm)
from_real(added(outer), torch.addr, T.addr, T.addr_)
