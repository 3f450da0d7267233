"""Rules of losses."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn import _reduction

from needle import ops

from .registry import rule
from .tables import layers, renamed

# -- modules -------------------------------------------------------------------------------------------------------------

layers("weight ignore_index reduction label_smoothing", nn.CrossEntropyLoss)
layers("weight ignore_index reduction", nn.NLLLoss)
layers("p margin weight reduction", nn.MultiMarginLoss)
layers("weight reduction", nn.BCELoss, nn.MultiLabelSoftMarginLoss)
layers("weight reduction pos_weight", nn.BCEWithLogitsLoss)
layers("reduction", nn.MSELoss, nn.L1Loss, nn.SoftMarginLoss, nn.MultiLabelMarginLoss)
layers("reduction beta", nn.SmoothL1Loss)
layers("reduction delta", nn.HuberLoss)
layers("reduction log_target", nn.KLDivLoss)
layers("log_input full eps reduction", nn.PoissonNLLLoss)
layers("full eps reduction", nn.GaussianNLLLoss)
layers("margin reduction", nn.HingeEmbeddingLoss, nn.MarginRankingLoss, nn.CosineEmbeddingLoss)
layers("blank reduction zero_infinity", nn.CTCLoss)
layers("margin p eps swap reduction", nn.TripletMarginLoss)

# -- functions -----------------------------------------------------------------------------------------------------------

NUMBERS = ("none", "mean", "sum")  # what aten's numbers of reductions mean


def reduction_of(size_average: Any, reduce: Any, reduction: Any) -> Any:
    """torch's `reduction`, or what its older arguments say."""
    if size_average is not None or reduce is not None:
        return _reduction.legacy_get_string(size_average, reduce, emit_warning=False)
    return NUMBERS[reduction] if isinstance(reduction, int) else reduction


def losses(signature: str, table: dict[tuple, Callable]) -> None:
    """The rules of torch functions that call a loss of needle's by the same names. signature: torch's."""
    torchs = inspect.signature(eval(f"lambda {signature}: None"))
    for targets, f in table.items():
        made = renamed(calling(f, torchs), targets[0].__name__)
        made.__signature__ = torchs  # type: ignore[attr-defined]
        rule(*targets)(made)


def calling(f: Callable, signature: inspect.Signature) -> Callable:
    def convert(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = dict(bound.arguments)
        older = (given.pop("size_average", None), given.pop("reduce", None))
        return f(**given | {"reduction": reduction_of(*older, given["reduction"])})

    return convert


def cross_entropy(input: Any, **options: Any) -> Any:
    return ops.cross_entropy(input, **options)


# Of torch.nn.functional, and of what it calls: there, torch's Python gives every loss where its schemas say 1, the mean.
OLD, END = "size_average=None, reduce=None, reduction='mean'", "reduction=0"
CLASSES = "input, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction='mean'"
EMBEDDING = {"hinge": "input, target, margin=1.0", "pair": "input1, input2, target, margin=0.0"}
TRIPLE = "anchor, positive, negative, margin=1.0, p=2.0, eps=1e-6, swap=False"
C = torch._C._nn

losses(f"{CLASSES}, label_smoothing=0.0", {(F.cross_entropy,): cross_entropy})
losses(CLASSES, {(F.nll_loss,): ops.nll_loss})
losses(
    f"input, target, weight=None, {END}, ignore_index=-100, label_smoothing=0.0",
    {(C.cross_entropy_loss,): cross_entropy},
)
losses(
    f"input, target, weight=None, {END}, ignore_index=-100",
    {(C.nll_loss_nd, torch.ops.aten.nll_loss2d.default): ops.nll_loss},
)
losses(f"input, target, p=1, margin=1.0, weight=None, {OLD}", {(F.multi_margin_loss,): ops.multi_margin_loss})
losses(
    f"input, target, weight=None, {OLD}",
    {
        (F.binary_cross_entropy,): ops.binary_cross_entropy,
        (F.multilabel_soft_margin_loss,): ops.multilabel_soft_margin_loss,
    },
)
losses(
    f"input, target, weight=None, {OLD}, pos_weight=None",
    {(F.binary_cross_entropy_with_logits,): ops.binary_cross_entropy_with_logits},
)
losses(
    f"input, target, weight=None, pos_weight=None, {END}",
    {(torch.binary_cross_entropy_with_logits,): ops.binary_cross_entropy_with_logits},
)
losses(f"input, target, {OLD}, weight=None", {(F.mse_loss,): ops.mse_loss, (F.l1_loss,): ops.l1_loss})
losses(f"input, target, {OLD}, beta=1.0", {(F.smooth_l1_loss,): ops.smooth_l1_loss})
losses("input, target, reduction='mean', delta=1.0, weight=None", {(F.huber_loss,): ops.huber_loss})
losses(f"input, target, {OLD}, log_target=False", {(F.kl_div,): ops.kl_div})
losses(f"input, target, {END}, *, log_target=False", {(torch.kl_div,): ops.kl_div})
losses(
    "input, target, log_input=True, full=False, size_average=None, eps=1e-8, reduce=None, reduction='mean'",
    {(F.poisson_nll_loss,): ops.poisson_nll_loss},
)
losses(f"input, target, log_input, full, eps, {END}", {(torch.poisson_nll_loss,): ops.poisson_nll_loss})
losses("input, target, var, full=False, eps=1e-6, reduction='mean'", {(F.gaussian_nll_loss,): ops.gaussian_nll_loss})
losses(
    f"input, target, {OLD}",
    {(F.soft_margin_loss,): ops.soft_margin_loss, (F.multilabel_margin_loss,): ops.multilabel_margin_loss},
)
losses(f"input, target, {END}", {(C.multilabel_margin_loss,): ops.multilabel_margin_loss})
for _end, _place in ((OLD, F), (END, torch)):
    losses(f"{EMBEDDING['hinge']}, {_end}", {(_place.hinge_embedding_loss,): ops.hinge_embedding_loss})
    losses(
        f"{EMBEDDING['pair']}, {_end}",
        {
            (_place.margin_ranking_loss,): ops.margin_ranking_loss,
            (_place.cosine_embedding_loss,): ops.cosine_embedding_loss,
        },
    )
    losses(f"{TRIPLE}, {_end}", {(_place.triplet_margin_loss,): ops.triplet_margin_loss})
for _given, _place in (("'mean'", F), ("0", torch)):
    losses(
        f"log_probs, targets, input_lengths, target_lengths, blank=0, reduction={_given}, zero_infinity=False",
        {(_place.ctc_loss,): ops.ctc_loss},
    )
