"""As calls.py, of functions of torch itself and of methods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .calls import CALLS, Made, Size, call, positive, t, whole

MANY = 3000  # numbers of a draw
LOGS: Any = lambda: (t(9, 2, 5).log_softmax(-1), whole(4, 2, 3) + 1, torch.tensor([9, 8]), torch.tensor([3, 2]))  # noqa: E731
SIGNS = torch.tensor([1, -1, 1])


def of_complex(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.complex64)


def cell(gates: int) -> list[torch.Tensor]:
    """Weights and biases of 3 features and 4 of state."""
    return [t(4 * gates, 3), t(4 * gates, 4), t(4 * gates), t(4 * gates)]


def layer(gates: int, *state: Any) -> Callable[[], Made]:
    rest = (True, 1, 0.0, False, False, False)  # biases, layers, dropout, train, bidirectional, batch_first
    return lambda: call(t(5, 2, 3), *state, cell(gates), *rest)


FUNCTIONS: dict[str, list[Callable[[], Made]]] = {
    "adaptive_max_pool1d": [lambda: call(t(2, 3, 8), 3)],
    "affine_grid_generator": [lambda: call(t(2, 2, 3), [2, 3, 4, 5], False)],
    "arange": [lambda: call(1, Size(0), 2), lambda: call(Size(0))],
    "as_tensor": [lambda: call(t(3, 4))],
    "asarray": [lambda: call(t(3, 4))],
    "batch_norm": [lambda: call(t(3, 4, 5), t(4), t(4), t(4), positive(4), False, 0.1, 1e-5, False)],
    "binomial": [lambda: call(torch.full((MANY,), 20.0), torch.full((MANY,), 0.35))],
    "chain_matmul": [lambda: call(t(3, 4), t(4, 5), t(5, 2))],
    "conv_tbc": [lambda: call(t(7, 2, 3), t(3, 3, 5), t(5), 1)],
    "convolution": [
        lambda: call(t(2, 4, 7, 6), t(6, 2, 3, 3), t(6), [2, 1], [1, 0], [1, 2], False, [0, 0], 2),
        lambda: call(t(2, 4, 7), t(4, 3, 3), None, [2], [1], [1], True, [1], 2),
    ],
    "cosine_embedding_loss": [lambda: call(t(3, 4), t(3, 4), SIGNS)],
    "ctc_loss": [lambda: call(*LOGS())],
    "einsum": [lambda: call("ij,jk->ik", t(3, 4), t(4, 5)), lambda: call("bii->bi", t(2, 4, 4))],
    "embedding_bag": [lambda: call(t(5, 6), whole(5, 9), torch.tensor([0, 4]))],
    "embedding_renorm_": [lambda: call(t(5, 3) * 3, whole(5, 4), 1.0, 2.0)],
    "empty": [lambda: call([Size(0), 2])],
    "empty_permuted": [lambda: call([Size(0), 2], [0, 1])],
    "empty_strided": [lambda: call([Size(0), 2], [2, 1])],
    "eye": [lambda: call(Size(0)), lambda: call(3, Size(0))],
    "fake_quantize_per_channel_affine": [
        lambda: call(t(3, 4), positive(3) / 9, torch.zeros(3, dtype=torch.int32), 0, -128, 127)
    ],
    "fake_quantize_per_tensor_affine": [lambda: call(t(3, 4), 0.1, 0, -128, 127)],
    "frobenius_norm": [lambda: call(t(3, 4), [0, 1]), lambda: call(t(3, 4), 1, True)],
    "full": [lambda: call([Size(0), 2], 0.5)],
    "grid_sampler": [lambda: call(t(2, 3, 4, 5), t(2, 6, 7, 2).tanh(), 0, 0, False)],
    "gru": [layer(3, torch.ones(1, 2, 4))],
    "gru_cell": [lambda: call(t(2, 3), t(2, 4), *cell(3))],
    "hinge_embedding_loss": [lambda: call(t(3), SIGNS)],
    "histogram": [lambda: call(t(30), 5, range=(-1.0, 1.0))],
    "instance_norm": [lambda: call(t(2, 3, 4), t(3), t(3), None, None, True, 0.1, 1e-5, False)],
    "istft": [lambda: call(of_complex(5, 9), 8, window=torch.hann_window(8))],
    "kl_div": [lambda: call(t(3, 4).log_softmax(1), t(3, 4).softmax(1)), lambda: call(t(3, 4), t(3, 4), 2, log_target=True)],
    "linspace": [lambda: call(0.0, 2.0, Size(0))],
    "lobpcg": [lambda: call(torch.eye(9) * torch.arange(1.0, 10), 2)],
    "logspace": [lambda: call(0.0, 2.0, Size(0))],
    "lstm": [layer(4, (torch.ones(1, 2, 4), torch.ones(1, 2, 4)))],
    "lstm_cell": [lambda: call(t(2, 3), (t(2, 4), t(2, 4)), *cell(4))],
    "margin_ranking_loss": [lambda: call(t(3), t(3), SIGNS, 0.1)],
    "max_pool1d": [lambda: call(t(2, 3, 8), 2)],
    "max_pool1d_with_indices": [lambda: call(t(2, 3, 8), 2)],
    "max_pool2d": [lambda: call(t(2, 3, 8, 7), [3, 2], [2, 2], [1, 1], [1, 2], True)],
    "max_pool3d": [lambda: call(t(2, 3, 4, 5, 6), 2)],
    "native_channel_shuffle": [lambda: call(t(2, 6, 3, 3), 2)],
    "native_dropout": [lambda: call(t(3, 4), 0.5, False)],
    "native_norm": [lambda: call(t(3, 4))],
    "norm_except_dim": [lambda: call(t(3, 4), 2, 0), lambda: call(t(3, 4, 2), 2, 1)],
    "normal": [lambda: call(torch.zeros(MANY) + 1, torch.ones(MANY) * 3), lambda: call(torch.zeros(MANY), 2.0)],
    "nuclear_norm": [lambda: call(t(3, 4))],
    "ones": [lambda: call([Size(0), 2])],
    "pca_lowrank": [lambda: call(t(9, 3) @ t(3, 5), 3)],
    "poisson": [lambda: call(torch.full((MANY,), 4.0))],
    "poisson_nll_loss": [lambda: call(t(3, 4), positive(3, 4), True, False, 1e-8, 1)],
    "polygamma": [lambda: call(1, positive(5)), lambda: call(3, positive(5))],
    "rand": [lambda: call([Size(0), MANY])],
    "randint": [lambda: call(7, [Size(0), MANY]), lambda: call(-3, 4, [Size(0), MANY])],
    "randint_like": [lambda: call(t(MANY), 7), lambda: call(whole(9, MANY), -3, 4)],
    "randn": [lambda: call([Size(0), MANY])],
    "randperm": [lambda: call(Size(0))],
    "range": [lambda: call(0, Size(0))],
    "rnn_relu": [layer(1, torch.ones(1, 2, 4))],
    "rnn_relu_cell": [lambda: call(t(2, 3), t(2, 4), *cell(1))],
    "rnn_tanh": [layer(1, torch.ones(1, 2, 4))],
    "rnn_tanh_cell": [lambda: call(t(2, 3), t(2, 4), *cell(1))],
    "scalar_tensor": [lambda: call(Size(0))],
    "segment_reduce": [lambda: call(t(6), "sum", lengths=torch.tensor([2, 4]))],
    "svd_lowrank": [lambda: call(t(9, 3) @ t(3, 5), 3)],
    "tensor": [lambda: call(Size(0)), lambda: call([Size(0), 2.0])],
    "tensordot": [lambda: call(t(3, 4, 5), t(4, 5, 2)), lambda: call(t(3, 4), t(2, 4), ([1], [1]))],
    "threshold": [lambda: call(t(3, 4), 0.2, -1.0)],
    "tril_indices": [lambda: call(Size(0), 4), lambda: call(4, Size(0), -1)],
    "triangular_solve": [
        lambda: call(t(4, 2), positive(4, 4)),
        lambda: call(t(4, 2), positive(4, 4), False, True),
        lambda: call(t(2, 4, 1), positive(2, 4, 4), False, False, True),
    ],
    "triu_indices": [lambda: call(Size(0), 4), lambda: call(4, Size(0), 1)],
    "where": [lambda: call(t(3, 4) > 0, t(3, 4), t(4)), lambda: call(t(3, 4) > 0, 2.0, t(3, 4))],
    "zeros": [lambda: call([Size(0), 2])],
    **{f"{n}_window": [lambda: call(Size(0)), lambda: call(Size(0), False)]  # type: ignore[misc]
       for n in ("bartlett", "blackman", "hamming", "hann", "kaiser")},
    **{n: [lambda: call(t(2, 3, 4), 0.5, False)]  # type: ignore[misc]
       for n in ("alpha_dropout", "dropout", "feature_alpha_dropout", "feature_dropout")},
}  # fmt: skip
# Of torch and of its tensors: the first argument is a tensor.
BOTH: dict[str, list[Callable[[], Made]]] = {
    "bernoulli": [lambda: call(torch.full((MANY,), 0.35))],
    "detach": [lambda: call(t(3, 4))],
    "detach_copy": [lambda: call(t(3, 4))],
    "element_size": [lambda: call(t(3, 4))],
    "exponential": [lambda: call(t(MANY), 2.0)],
    "fill_diagonal": [lambda: call(t(4, 4), 2.0), lambda: call(t(7, 3), 2.0, True)],
    "float_power_": [lambda: call(positive(3, 4).double(), 2.5)],
    "get_device": [lambda: call(t(3, 4))],
    "imag": [lambda: call(of_complex(3, 4))],
    "is_complex": [lambda: call(t(3, 4))],
    "is_conj": [lambda: call(t(3, 4))],
    "is_floating_point": [lambda: call(t(3, 4))],
    "is_inference": [lambda: call(t(3, 4))],
    "is_neg": [lambda: call(t(3, 4))],
    "is_nonzero": [lambda: call(t(1))],
    "is_same_size": [lambda: call(t(3, 4), t(3, 4))],
    "is_signed": [lambda: call(t(3, 4))],
    "multinomial": [lambda: call(torch.tensor([[0.15, 0.2, 0.3, 0.35]]), MANY, True)],
    "numel": [lambda: call(t(3, 4))],
    "rand_like": [lambda: call(t(MANY))],
    "randn_like": [lambda: call(t(MANY))],
    "select_copy": [lambda: call(t(3, 4), 0, 1)],
    "slice_copy": [lambda: call(t(3, 4), 0, 1, 3)],
    "split_copy": [lambda: call(t(6, 2), 2)],
    "unsafe_split_with_sizes": [lambda: call(t(6, 2), [2, 4])],
    "view_as_complex_copy": [lambda: call(t(3, 2))],
    "view_as_real": [lambda: call(of_complex(3, 2))],
    "view_as_real_copy": [lambda: call(of_complex(3, 2))],
}
METHODS: dict[str, list[Callable[[], Made]]] = {
    "bernoulli_": [lambda: call(t(MANY), 0.35)],
    "byte": [lambda: call(t(3, 4) * 300), lambda: call(whole(900, 3, 4) - 400)],
    "char": [lambda: call(t(3, 4) * 300), lambda: call(whole(900, 3, 4) - 400)],
    "copy_": [lambda: call(t(3, 4), t(4)), lambda: call(t(3, 4), whole(4, 3, 4))],
    "cpu": [lambda: call(t(3, 4))],
    "dim": [lambda: call(t(3, 4))],
    "dim_order": [lambda: call(t(3, 4))],
    "geometric": [lambda: call(t(MANY), 0.3)],
    "istft": FUNCTIONS["istft"],
    "item": [lambda: call(t(1))],
    "log_normal": [lambda: call(t(MANY), 0.5, 0.3)],
    "cauchy": [lambda: call(t(50 * MANY), 1.0, 2.0)],
    "normal": [lambda: call(t(MANY), 1.0, 2.0)],
    "uniform": [lambda: call(t(MANY), 1.0, 2.0)],
    "ndimension": [lambda: call(t(3, 4))],
    "nelement": [lambda: call(t(3, 4))],
    "new_tensor": [lambda: call(t(3, 4), [1.0, 2.0])],
    "random": [lambda: call(t(MANY), 0, 7), lambda: call(whole(9, MANY), 7)],
    "requires_grad_": [lambda: call(t(3, 4))],
    "short": [lambda: call(t(3, 4) * 90000), lambda: call(whole(90000, 3, 4) - 40000)],
    "size": [lambda: call(t(3, 4), 1), lambda: call(t(3, 4), -2)],
    "to_dense": [lambda: call(t(3, 4))],
    "type": [lambda: call(t(3, 4), torch.float64), lambda: call(t(3, 4) * 3, torch.int64)],
    "type_as": [lambda: call(t(3, 4) * 3, whole(4, 2)), lambda: call(whole(4, 2), t(3))],
}
# Python's operators, by how they are called.
BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
BITS = ("and", "or", "xor", "lshift", "rshift")
for _name in BINARY:
    for _prefix in ("", "r", "i"):
        METHODS[f"__{_prefix}{_name}__"] = [
            lambda: call(positive(3, 4), positive(4)),
            lambda: call(positive(3, 4), 1.5),
        ]
for _name in BITS:
    for _prefix in ("", "r", "i"):
        METHODS[f"__{_prefix}{_name}__"] = [lambda: call(whole(9, 3, 4), whole(5, 4)), lambda: call(whole(9, 3, 4), 3)]
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    METHODS[f"__{_name}__"] = [lambda: call(whole(4, 3, 4), whole(4, 4)), lambda: call(t(3, 4), 0.2)]
METHODS |= {
    "__matmul__": [lambda: call(t(3, 4), t(4, 5)), lambda: call(t(2, 3, 4), t(4))],
    "__rmatmul__": [lambda: call(t(4, 5), t(3, 4))],
    "__neg__": [lambda: call(t(3, 4))],
    "__pos__": [lambda: call(t(3, 4))],
    "__abs__": [lambda: call(t(3, 4))],
    "__invert__": [lambda: call(whole(9, 3, 4)), lambda: call(t(3, 4) > 0)],
    "__getitem__": [lambda: call(t(3, 4), (slice(1, None), None, 2)), lambda: call(t(5, 4), whole(5, 3))],
    "__len__": [lambda: call(t(3, 4))],
}
OPERATORS = tuple(n for n in METHODS if n.startswith("__"))
for _name, _made in (FUNCTIONS | BOTH).items():
    CALLS.setdefault(f"torch.{_name}", _made)
for _name, _made in (BOTH | METHODS).items():
    CALLS.setdefault(f"torch.Tensor.{_name}", _made)
