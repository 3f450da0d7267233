"""Calls of functions that torch's own tests have no samples of, or only such as hide what matters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch2needle.rules import drawn
from torch2needle.rules.registry import FUNCTION_RULES, target_name


class Size:
    """The size of the first tensor's axis."""

    def __init__(self, axis: int) -> None:
        self.axis = axis


Made = tuple[tuple, dict[str, Any]]


def call(*args: Any, **kwargs: Any) -> Made:
    return args, kwargs


def t(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


def positive(*shape: int) -> torch.Tensor:
    return torch.rand(shape) * 2 + 0.3


def whole(below: int, *shape: int) -> torch.Tensor:
    return torch.randint(below, shape)


# What a call returns beside its first result is for torch's own gradient.
FIRST_RESULT = ("aten._embedding_bag.default", "torch.embedding_bag")
# Of these, the signs of the first and the last result depend on a draw, and their product does not.
PRODUCT = ("torch.pca_lowrank", "torch.svd_lowrank")
# torch's gradient of these goes on through what was written over, or has numbers in the triangle that nothing reads.
OTHER_GRADIENT = (
    *(f"torch.Tensor.logical_{n}_" for n in ("and", "or", "not", "xor")),
    *(f"{place}.cholesky_{n}" for place in ("torch", "torch.Tensor") for n in ("inverse", "solve")),
)
# Of these only the shape is the same at every call.
UNDEFINED = (
    *("aten.empty.memory_format", "aten.empty_strided.default", "torch.empty_like", "torch.Tensor.new_empty"),
    "torch.Tensor.new_empty_strided",
    *(f"torch.{n}" for n in ("empty", "empty_permuted", "empty_strided")),
)
# Of these, the result is a number or a truth, here a factor.
NUMBER = (
    *("aten._local_scalar_dense.default", "torch.Tensor.item", "torch.Tensor.dim", "torch.Tensor.ndimension"),
    *("torch.Tensor.size", "torch.Tensor.nelement", "torch.Tensor.__len__"),
    *(
        f"{place}.{n}"
        for place in ("torch", "torch.Tensor")
        for n in (
            *("element_size", "get_device", "numel", "is_complex", "is_conj", "is_floating_point", "is_inference"),
            *("is_neg", "is_nonzero", "is_same_size", "is_signed", "equal", "allclose"),
        )
    ),
)
# Of these the numbers are others at every call; their distribution is compared.
RANDOM = {target_name(target) for target, rule in FUNCTION_RULES.items() if rule.__module__ == drawn.__name__}
RANDOM |= {f"aten.{name.rpartition('.')[2]}.default" for name in RANDOM}  # which share their rules
F, S = "torch.nn.functional", "torch.special"
CALLS: dict[str, list[Callable[[], Made]]] = {
    f"{F}.affine_grid": [lambda: call(t(2, 2, 3), [2, 3, 4, 5], align_corners=False)],
    f"{F}.batch_norm": [lambda: call(t(3, 4, 5), t(4), positive(4), t(4), t(4))],
    f"{F}.instance_norm": [lambda: call(t(3, 4, 5), t(4), positive(4), t(4), t(4), use_input_stats=False)],
    f"{F}.conv_tbc": [lambda: call(t(7, 2, 3), t(3, 3, 5), t(5), 1)],
    f"{F}.ctc_loss": [
        lambda: call(t(9, 2, 5).log_softmax(-1), whole(4, 2, 3) + 1, torch.tensor([9, 8]), torch.tensor([3, 2]))
    ],
    f"{F}.dropout1d": [lambda: call(t(2, 3, 4), 0.5, False)],
    f"{F}.embedding": [lambda: call(whole(5, 3, 4), t(5, 6)), lambda: call(whole(5, 3), t(5, 6), padding_idx=2)],
    f"{F}.embedding_bag": [lambda: call(whole(5, 3, 4), t(5, 6), mode="mean")],
    f"{F}.fold": [lambda: call(t(2, 12, 12), (4, 5), (2, 2))],
    f"{F}.fractional_max_pool2d": [
        lambda: call(t(2, 3, 7, 8), 2, output_size=(4, 5), _random_samples=torch.rand(2, 3, 2)),
    ],
    f"{F}.fractional_max_pool3d": [
        lambda: call(t(2, 3, 7, 8, 6), 2, output_size=(4, 5, 3), _random_samples=torch.rand(2, 3, 3)),
    ],
    f"{F}.grouped_mm": [lambda: call(t(6, 16), t(3, 16, 8), offs=torch.tensor([1, 4, 6], dtype=torch.int32))],
    f"{F}.gumbel_softmax": [lambda: call(torch.zeros(3000, 4)), lambda: call(torch.zeros(3000, 4), hard=True)],
    f"{F}.lp_pool1d": [lambda: call(positive(2, 3, 8), 2, 3, 2)],
    f"{F}.lp_pool2d": [lambda: call(positive(2, 3, 8, 7), 3, 2)],
    f"{F}.lp_pool3d": [lambda: call(positive(2, 3, 4, 5, 6), 2, 2, 1)],
    f"{F}.native_channel_shuffle": [lambda: call(t(2, 6, 3, 3), 2)],
    f"{F}.one_hot": [lambda: call(whole(4, 3, 2), 4)],
    f"{F}.rrelu": [lambda: call(t(3, 4), 0.1, 0.3, False)],
    f"{F}.soft_margin_loss": [lambda: call(t(3, 4), whole(2, 3, 4) * 2.0 - 1)],
    f"{F}.threshold_": [lambda: call(t(3, 4), 0.2, -1.0)],
    f"{F}.upsample": [lambda: call(t(2, 3, 4, 5), scale_factor=2)],
    f"{S}.gammainc": [lambda: call(positive(20) * 5, positive(20) * 5)],
    f"{S}.gammaincc": [lambda: call(positive(20) * 5, positive(20) * 5)],
    f"{S}.polygamma": [*(lambda n=n: call(n, t(20) * 3) for n in range(5))],  # type: ignore[misc]
    f"{S}.zeta": [lambda: call(positive(20) * 4 + 1, positive(20) * 5)],
    "torch.fft.fftfreq": [lambda: call(Size(0), 0.5)],
    "torch.fft.rfftfreq": [lambda: call(Size(0), 0.5)],
}
for _name in dir(torch.special):
    if "_polynomial_" in _name:
        CALLS[f"{S}.{_name}"] = [lambda: call(t(20), 5), lambda: call(t(20), 0), lambda: call(t(20), 11)]
CALLS |= {
    f"{F}.{n}": [lambda n=n, shape=shape: call(t(*shape), 2)]  # type: ignore[misc]
    for n, shape in {
        "max_pool1d_with_indices": (2, 3, 8),
        "max_pool2d_with_indices": (2, 3, 8, 7),
        "max_pool3d_with_indices": (2, 3, 4, 5, 6),
        "adaptive_max_pool1d_with_indices": (2, 3, 8),
        "adaptive_max_pool2d_with_indices": (2, 3, 8, 7),
        "adaptive_max_pool3d_with_indices": (2, 3, 4, 5, 6),
    }.items()
}
for _rank in (2, 3):
    CALLS[f"{F}.fractional_max_pool{_rank}d_with_indices"] = CALLS[f"{F}.fractional_max_pool{_rank}d"]
for _name in ("celu", "elu", "hardtanh", "leaky_relu", "relu", "selu"):
    CALLS[f"{F}.{_name}_"] = [lambda: call(t(3, 4))]
CALLS[f"{F}.rrelu_"] = CALLS[f"{F}.rrelu"]

# -- aten ----------------------------------------------------------------------------------------------------------------

MASK = [True, True, True]


ATEN: dict[str, list[Callable[[], Made]]] = {
    "_adaptive_avg_pool2d.default": [lambda: call(t(2, 3, 7, 8), [3, 4])],
    "_adaptive_avg_pool2d_backward.default": [lambda: call(t(2, 3, 3, 4), t(2, 3, 7, 8))],
    "_adaptive_avg_pool3d.default": [lambda: call(t(2, 3, 4, 5, 6), [2, 3, 4])],
    "_cdist_forward.default": [
        lambda: call(t(3, 4, 2), t(3, 5, 2), 2.0, None),
        lambda: call(t(4, 2), t(5, 2), 1.0, 1),
    ],
    "_embedding_bag.default": [lambda: call(t(5, 3), whole(5, 6), torch.tensor([0, 2, 2]))],
    "_fft_c2r.default": [lambda: call(torch.randn(3, 5, dtype=torch.complex64), [1], 2, 8)],
    "_fft_r2c.default": [lambda: call(t(3, 8), [1], 0, True), lambda: call(t(4, 8), [0, 1], 1, False)],
    "_local_scalar_dense.default": [lambda: call(t(1))],
    "_log_softmax.default": [lambda: call(t(3, 4), 1, False)],
    "_native_batch_norm_legit.no_stats": [lambda: call(t(3, 4, 5), t(4), t(4), True, 0.1, 1e-5)],
    "_native_batch_norm_legit.default": [lambda: call(t(3, 4, 5), t(4), t(4), t(4), positive(4), False, 0.1, 1e-5)],
    "_native_batch_norm_legit_no_training.default": [
        lambda: call(t(3, 4, 5), t(4), t(4), t(4), positive(4), 0.1, 1e-5)
    ],
    "_pdist_forward.default": [lambda: call(t(5, 3)), lambda: call(t(4, 3), 1.0)],
    "_softmax.default": [lambda: call(t(3, 4), 1, False)],
    "_to_copy.default": [lambda: call(t(3, 4), dtype=torch.int64), lambda: call(t(3, 4))],
    "adaptive_avg_pool1d.default": [lambda: call(t(2, 3, 7), [3])],
    "alias.default": [lambda: call(t(3, 4))],
    "any.dims": [lambda: call(t(3, 4, 2) > 0.5, [0, 2]), lambda: call(t(3, 4) > 3, None, True)],
    "arange.start_step": [lambda: call(1, Size(0), 2)],
    "atan2.out": [lambda: call(t(3, 4), t(3, 4), out=t(3, 4))],
    "avg_pool1d.default": [lambda: call(t(2, 3, 7), [3])],
    "avg_pool2d_backward.default": [lambda: call(t(2, 3, 3, 4), t(2, 3, 6, 8), [2, 2], [], [0, 0], False, True, None)],
    "bitwise_and.Scalar": [lambda: call(whole(9, 3, 4), 5)],
    "bitwise_or.Scalar": [lambda: call(whole(9, 3, 4), 5)],
    "bitwise_xor.Scalar": [lambda: call(whole(9, 3, 4), 5)],
    "clamp.default": [lambda: call(t(3, 4), -0.3, 0.5), lambda: call(t(3, 4), None, 0.5)],
    "clamp.Tensor": [lambda: call(t(3, 4), t(3, 4) - 1, t(4) + 1)],
    "col2im.default": [lambda: call(t(2, 12, 12), [4, 5], [2, 2], [1, 1], [0, 0], [1, 1])],
    "convolution.default": [
        lambda: call(t(2, 4, 7, 6), t(6, 2, 3, 3), t(6), [2, 1], [1, 0], [1, 2], False, [0, 0], 2),
        lambda: call(t(2, 4, 7), t(4, 3, 3), None, [2], [1], [1], True, [1], 2),
    ],
    "convolution_backward.default": [
        lambda: call(t(2, 6, 4, 2), t(2, 4, 7, 6), t(6, 2, 3, 3), [6], [2, 1], [1, 0], [1, 2], False, [0, 0], 2, MASK),
        lambda: call(t(2, 6, 14), t(2, 4, 7), t(4, 3, 3), [6], [2], [1], [1], True, [1], 2, MASK),
    ],
    "copy.default": [lambda: call(t(3, 4), t(4))],
    "div.Scalar_mode": [*(lambda m=m: call(t(3, 4), 0.3, rounding_mode=m) for m in (None, "floor", "trunc"))],  # type: ignore[misc]
    "elu.default": [lambda: call(t(3, 4), 1.5, 0.7, 1.2)],
    "embedding.default": [lambda: call(t(5, 3), whole(5, 2, 3)), lambda: call(t(5, 3), whole(5, 2, 3), 2)],
    "embedding_dense_backward.default": [lambda: call(t(2, 3, 4), whole(5, 2, 3), 5, 2, False)],
    "empty.memory_format": [lambda: call([Size(0), 2])],
    "empty_strided.default": [lambda: call([Size(0), 2], [2, 1])],
    "fill.Scalar": [lambda: call(whole(4, 3, 4), 2)],
    "full.default": [lambda: call([Size(0), 2], 0.5)],
    "index.Tensor": [lambda: call(t(4, 5), [None, whole(5, 3)]), lambda: call(t(4, 5), [whole(4, 2, 1), whole(5, 3)])],
    "index_select.default": [lambda: call(t(4, 5), 1, whole(5, 3))],
    "max_pool2d_with_indices.default": [lambda: call(t(2, 3, 8, 7), [3, 2], [2, 2], [1, 1], [1, 2], True)],
    "max_pool3d_with_indices.default": [lambda: call(t(2, 3, 4, 5, 6), [2, 2, 3])],
    "max_pool2d_with_indices_backward.default": [
        lambda: call(t(1, 2, 2, 2), t(1, 2, 4, 5), [2, 2], [], [0, 0], [1, 1], False, whole(20, 1, 2, 2, 2)),
    ],
    "native_dropout.default": [lambda: call(t(3, 4), 0.5, False)],
    "native_group_norm.default": [lambda: call(t(2, 6, 4), t(6), t(6), 2, 6, 4, 3, 1e-5)],
    "native_layer_norm.default": [lambda: call(t(2, 6, 4), [6, 4], t(6, 4), t(6, 4), 1e-5)],
    "native_group_norm_backward.default": [
        lambda: call(t(2, 6, 4), t(2, 6, 4), t(2, 3), positive(2, 3), t(6), 2, 6, 4, 3, MASK)
    ],
    "native_layer_norm_backward.default": [
        lambda: call(t(2, 6, 4), t(2, 6, 4), [4], t(2, 6, 1), positive(2, 6, 1), t(4), t(4), MASK)
    ],
    "nonzero.default": [lambda: call(t(3, 4) > 0)],
    "rand.default": [lambda: call([Size(0), 3000])],
    "randn.default": [lambda: call([Size(0), 3000])],
    "randperm.default": [lambda: call(Size(0))],
    "reflection_pad1d.default": [lambda: call(t(2, 3, 4), [1, 2])],
    "reflection_pad2d.default": [lambda: call(t(2, 3, 4, 5), [1, 2, 0, 3])],
    "reflection_pad3d.default": [lambda: call(t(2, 3, 4, 5, 3), [1, 2, 0, 3, 1, 1])],
    "replication_pad2d.default": [lambda: call(t(2, 3, 4, 5), [1, 2, 0, 3])],
    "replication_pad3d.default": [lambda: call(t(2, 3, 4, 5, 3), [1, 2, 0, 3, 1, 1])],
    "scalar_tensor.default": [lambda: call(Size(0))],
    "scatter.value": [lambda: call(t(3, 4), 1, whole(4, 3, 2), 2.5)],
    "squeeze.dims": [lambda: call(t(3, 1, 4, 1), [1, 3])],
    "sym_numel.default": [lambda: call(t(3, 4))],
    "sym_size.int": [lambda: call(t(3, 4), 1)],
    "upsample_bilinear2d.vec": [
        lambda: call(t(2, 3, 4, 5), [7, 9], False, None),
        lambda: call(t(2, 3, 4, 5), None, True, [2.0, 1.5]),
    ],
    "upsample_nearest2d.vec": [lambda: call(t(2, 3, 4, 5), [7, 9], None)],
    "where.self": [lambda: call(t(3, 4) > 0, t(3, 4), t(4))],
}
for _name in ("add", "sub", "mul", "div", "eq", "ne", "ge", "gt", "le", "lt", "fmod", "remainder"):
    ATEN[f"{_name}.Scalar"] = [lambda: call(t(3, 4), 0.7), lambda: call(whole(9, 3, 4), 2)]
ATEN["pow.Tensor_Scalar"] = [lambda: call(t(3, 4), 3), lambda: call(positive(3, 4), 0.7)]
ATEN["pow.Scalar"] = [lambda: call(0.7, t(3, 4))]
CALLS |= {f"aten.{name}": made for name, made in ATEN.items()}
