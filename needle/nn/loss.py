"""Losses as layers: torch's names and arguments, one function of `needle.ops` each."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from needle import ops
from needle.autograd import Tensor

from .arguments import Check, choice, flag, integer, number, wrong
from .function import Declared

__all__ = [
    "BCELoss",
    "BCEWithLogitsLoss",
    "CTCLoss",
    "CosineEmbeddingLoss",
    "CrossEntropyLoss",
    "GaussianNLLLoss",
    "HingeEmbeddingLoss",
    "HuberLoss",
    "KLDivLoss",
    "L1Loss",
    "MSELoss",
    "MarginRankingLoss",
    "MultiLabelMarginLoss",
    "MultiLabelSoftMarginLoss",
    "MultiMarginLoss",
    "NLLLoss",
    "PoissonNLLLoss",
    "SmoothL1Loss",
    "SoftMarginLoss",
    "TripletMarginLoss",
]


def weights(place: str, value: Any) -> Tensor:
    """Numbers, in a tensor, array or list, as a buffer; whole ones and lists as float32."""
    value = getattr(value, "detach", lambda: value)()
    try:
        made = Tensor(value, requires_grad=False) if hasattr(value, "dtype") else None
        if made is None or made.dtype in ("int32", "int64", "bool"):
            made = Tensor(np.asarray(value, "float32"), requires_grad=False)
    except (TypeError, ValueError):
        raise wrong(place, "numbers", value, TypeError) from None
    return made


def tuples(values: Any) -> Any:
    return tuple(tuples(v) for v in values) if isinstance(values, list) else values


class Loss(Declared):
    """One function of needle.ops, of the forward's tensors and of the fields by name."""

    arguments: ClassVar[dict[str, Check]] = {
        "reduction": choice("mean", "sum", "none"),
        "ignore_index": integer(),
        "label_smoothing": number(0.0, 1.0),
        "blank": integer(0),
        "margin": number(),
        "delta": number(0.0),
        "beta": number(0.0),
        "p": number(0.0),
        **dict.fromkeys(("weight", "pos_weight"), weights),
        **dict.fromkeys(("log_target", "log_input", "full", "swap", "zero_infinity"), flag),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        held = {n: t for n in self.names if isinstance(t := getattr(self, n), Tensor)}
        self._config = {**self._config, **{n: tuples(t.numpy().tolist()) for n, t in held.items()}}

    def forward(self, *tensors: Any) -> Tensor:
        return self.function(*tensors, **{name: getattr(self, name) for name in self.names})

    def extra_repr(self) -> str:
        own = {n: getattr(self, n) for n in self.names}
        return ", ".join(f"{n}={v}" for n, v in own.items() if not isinstance(v, Tensor | None))


# -- classes -------------------------------------------------------------------------------------------------------------


class CrossEntropyLoss(Loss, function=ops.cross_entropy):
    """Of logits (N, C, *) or (C,), and class numbers (N, *) or (), or probabilities: see `ops.cross_entropy`."""

    weight: Any = None
    ignore_index: int = -100
    reduction: str = "mean"
    label_smoothing: float = 0.0


class NLLLoss(Loss, function=ops.nll_loss):
    """Of log-probabilities (N, C, *) or (C,), and class numbers (N, *) or ()."""

    weight: Any = None
    ignore_index: int = -100
    reduction: str = "mean"


class MultiMarginLoss(Loss, function=ops.multi_margin_loss):
    """Of numbers (N, C) or (C,), and class numbers (N,) or ()."""

    arguments: ClassVar[dict[str, Check]] = {**Loss.arguments, "p": integer(1, 2)}
    p: int = 1
    margin: float = 1.0
    weight: Any = None
    reduction: str = "mean"


class MultiLabelMarginLoss(Loss, function=ops.multilabel_margin_loss):
    """Of numbers (N, C) or (C,), and class numbers of that shape, those before the first -1."""

    reduction: str = "mean"


class BCELoss(Loss, function=ops.binary_cross_entropy):
    """Of probabilities and targets of their shape."""

    weight: Any = None
    reduction: str = "mean"


class BCEWithLogitsLoss(Loss, function=ops.binary_cross_entropy_with_logits):
    """Of logits and targets of their shape."""

    weight: Any = None
    reduction: str = "mean"
    pos_weight: Any = None


class MultiLabelSoftMarginLoss(Loss, function=ops.multilabel_soft_margin_loss):
    """Of logits (..., C) and targets of their shape; the mean over the classes."""

    weight: Any = None
    reduction: str = "mean"


class CTCLoss(Loss, function=ops.ctc_loss):
    """Of log-probabilities (T, N, C) or (T, C), labels (N, S), (S,) or those of all in one row, and lengths of both."""

    blank: int = 0
    reduction: str = "mean"
    zero_infinity: bool = False


# -- numbers -------------------------------------------------------------------------------------------------------------


class MSELoss(Loss, function=ops.mse_loss):
    """Of numbers and targets that broadcast."""

    reduction: str = "mean"


class L1Loss(Loss, function=ops.l1_loss):
    """Of numbers and targets that broadcast."""

    reduction: str = "mean"


class SmoothL1Loss(Loss, function=ops.smooth_l1_loss):
    """Of numbers and targets that broadcast."""

    reduction: str = "mean"
    beta: float = 1.0


class HuberLoss(Loss, function=ops.huber_loss):
    """Of numbers and targets that broadcast."""

    reduction: str = "mean"
    delta: float = 1.0


class KLDivLoss(Loss, function=ops.kl_div):
    """Of log-probabilities, and probabilities or their logarithms; "batchmean" is the sum over the size of the batch."""

    arguments: ClassVar[dict[str, Check]] = {
        **Loss.arguments,
        "reduction": choice("mean", "batchmean", "sum", "none"),
    }
    reduction: str = "mean"
    log_target: bool = False


class PoissonNLLLoss(Loss, function=ops.poisson_nll_loss):
    """Of rates, or their logarithms, and counts that broadcast."""

    log_input: bool = True
    full: bool = False
    eps: float = 1e-8
    reduction: str = "mean"


class GaussianNLLLoss(Loss, function=ops.gaussian_nll_loss):
    """Of means, targets of their shape, and variances, one for each or for each row."""

    full: bool = False
    eps: float = 1e-6
    reduction: str = "mean"


class SoftMarginLoss(Loss, function=ops.soft_margin_loss):
    """Of numbers and targets 1 or -1."""

    reduction: str = "mean"


class HingeEmbeddingLoss(Loss, function=ops.hinge_embedding_loss):
    """Of distances and targets 1 or -1."""

    margin: float = 1.0
    reduction: str = "mean"


# -- pairs and triples ---------------------------------------------------------------------------------------------------


class MarginRankingLoss(Loss, function=ops.margin_ranking_loss):
    """Of two inputs and targets 1 or -1, all with as many axes."""

    margin: float = 0.0
    reduction: str = "mean"


class CosineEmbeddingLoss(Loss, function=ops.cosine_embedding_loss):
    """Of vectors (N, D), vectors (N, D) and targets (N,) of 1 or -1; or (D,), (D,) and ()."""

    margin: float = 0.0
    reduction: str = "mean"


class TripletMarginLoss(Loss, function=ops.triplet_margin_loss):
    """Of anchors, positives and negatives (..., D)."""

    margin: float = 1.0
    p: float = 2.0
    eps: float = 1e-6
    swap: bool = False
    reduction: str = "mean"
