"""Every op as a function; the op classes live in the modules below."""

from .activation import ACTIVATIONS, elu, gelu, hardsigmoid, hardswish, leaky_relu, relu, relu6, sigmoid, silu, tanh
from .comparison import eq, ge, gt, le, lt, ne
from .conv import conv, conv2d, conv_transpose2d
from .elementwise import (
    add,
    add_scalar,
    cast,
    clamp,
    divide,
    divide_scalar,
    maximum,
    minimum,
    mul_scalar,
    multiply,
    negate,
    power,
    power_scalar,
    subtract,
    where,
)
from .fused import (
    fused_conv2d_relu,
    fused_conv_batchnorm2d,
    fused_conv_batchnorm2d_relu,
    fused_linear_batchnorm,
    fused_linear_batchnorm_relu,
    fused_linear_relu,
)
from .fused_norm import fused_batchnorm_relu
from .indexing import getitem
from .join import TupleGetItem, chunk, concat, dilate, make_tuple, split, split_sizes, stack, tuple_get_item, undilate
from .linalg import linear, matmul
from .maths import absolute, ceil, cos, erf, exp, floor, log, reciprocal, round, rsqrt, sign, sin, softplus, sqrt
from .norm import batch_norm
from .pool import adaptive_avg_pool2d, avg_pool2d, max_pool2d
from .reduce import amax, amin, mean, summation
from .resize import interpolate
from .shape import broadcast_to, flatten, flip, pad, permute, reshape, squeeze, transpose, unsqueeze
from .softmax import cross_entropy, log_softmax, logsoftmax, logsumexp, softmax, softmax_loss

abs = absolute
cat = concat

__all__ = [n for n in dir() if not n.startswith("_")]
