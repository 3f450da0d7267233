"""Every op as a function, and by `__getattr__` as a class; the classes live in the modules below."""

from typing import Any as _Any

from needle.op import OPS as _OPS

from .activation import ACTIVATIONS, elu, gelu, hardsigmoid, hardswish, leaky_relu, relu, relu6, sigmoid, silu, tanh
from .arithmetic import (
    bitwise,
    bitwise_not,
    clamp,
    clamp_max,
    clamp_min,
    expm1,
    floor_divide,
    fmax,
    fmin,
    fmod,
    frac,
    isfinite,
    isinf,
    isnan,
    log1p,
    logical_and,
    logical_not,
    logical_or,
    logical_xor,
    remainder,
    trunc,
)
from .attention import scaled_dot_product_attention
from .comparison import eq, ge, gt, le, lt, ne
from .composed_activation import (
    celu,
    glu,
    hardshrink,
    hardtanh,
    logsigmoid,
    mish,
    prelu,
    selu,
    softshrink,
    softsign,
    tanhshrink,
    threshold,
)
from .conv import conv, conv2d, conv_transpose2d
from .conv_nd import conv1d, conv3d, conv_transpose1d, conv_transpose3d
from .creation import arange_like, full_like, linspace_like
from .cross_entropy import cross_entropy, softmax_loss
from .einsum import einsum
from .elementwise import (
    add,
    add_scalar,
    at_least,
    at_most,
    cast,
    divide,
    divide_scalar,
    maximum,
    minimum,
    mul_scalar,
    multiply,
    negate,
    subtract,
    where,
)
from .embedding import embedding, one_hot
from .fused import fused_conv2d_relu, fused_conv_batchnorm2d, fused_conv_batchnorm2d_relu
from .fused_attention import fused_multihead_attention
from .fused_linear import fused_linear_batchnorm, fused_linear_batchnorm_relu, fused_linear_relu
from .fused_norm import fused_batchnorm_relu
from .gather import gather, index_tensors, masked_fill, take, take_along
from .heads import attention_bias, merge_heads, split_heads
from .indexing import getitem, setitem
from .join import (
    Piece,
    TupleGetItem,
    chunk,
    concat,
    dilate,
    make_tuple,
    split,
    split_sizes,
    stack,
    tuple_get_item,
    undilate,
)
from .layer_norm import group_norm, instance_norm, layer_norm, local_response_norm, normalize, rms_norm
from .linalg import inner, linear, matmul
from .maths import absolute, ceil, cos, erf, exp, floor, log, reciprocal, round, rsqrt, sign, sin, softplus, sqrt
from .norm import batch_norm
from .padding import pad
from .pool import adaptive_avg_pool2d, avg_pool2d, max_pool2d
from .pool_nd import (
    adaptive_avg_pool1d,
    adaptive_avg_pool3d,
    adaptive_max_pool1d,
    adaptive_max_pool2d,
    adaptive_max_pool3d,
    avg_pool1d,
    avg_pool3d,
    max_pool1d,
    max_pool3d,
)
from .power import power, power_scalar
from .rearrange import channel_shuffle, fold, pixel_shuffle, pixel_unshuffle, unfold
from .recurrent import gru, lstm, rnn
from .reduce import amax, amin, every, mean, prod, some, std, summation, variance, vector_norm
from .resize import interpolate
from .runtime_shape import (
    broadcast_like,
    cast_like,
    diagonal,
    moveaxis,
    repeat_interleave,
    reshape_like,
    roll,
    scaled,
    stop_gradient,
    stored_like,
    tile,
    triangle,
    unflatten,
)
from .shape import broadcast_to, flatten, flip, permute, reshape, squeeze, transpose, unsqueeze
from .softmax import log_softmax, logsoftmax, logsumexp, softmax
from .sorting import argmax, argmin, argsort, cumsum, max_along, min_along, sort, topk


def __getattr__(name: str) -> _Any:
    """Op classes by name, as in the course: `ops.EWiseAdd`, `isinstance(t.op, ops.MatMul)`."""
    try:
        return _OPS[name]
    except KeyError:
        raise AttributeError(f"module 'needle.ops' has no attribute '{name}'") from None


abs = absolute
cat = concat

__all__ = [n for n in dir() if not n.startswith("_")]

from . import fused_transpose, ops_mathematic, values  # noqa: E402 - ops that `load` has to know; the others take names
