"""Rules of losses: torch's layers and functions inside converted models, and exported programs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import torch2needle
from conversion import close, converts
from needle import nn
from needle.backend_selection import BACKEND

pytestmark = [
    pytest.mark.skipif(BACKEND == "np", reason="conversion is tested on needle's own arrays"),
    pytest.mark.filterwarnings("ignore:.*target size.*", "ignore:reduction. 'mean'", "ignore:size_average"),
]

G = torch.Generator().manual_seed(0)
W3, W4 = torch.rand(3, generator=G) + 0.5, torch.rand(4, generator=G) + 0.5
Y3, IMAGE_Y = torch.tensor([0, 2, -100, 1, 2]), torch.randint(0, 3, (2, 4, 5), generator=G)
UNIT, SIGN = torch.rand(5, 4, generator=G), torch.tensor([1.0, -1.0, 1.0, 1.0, -1.0])
ONES = torch.sign(torch.randn(5, 4, generator=G))
T = torch.nn
LAYERS: list[tuple[Callable[[], T.Module], tuple[Any, ...]]] = [
    (lambda: T.CrossEntropyLoss(), ((5, 3), Y3)),
    (lambda: T.CrossEntropyLoss(W3, ignore_index=2, reduction="sum", label_smoothing=0.1), ((2, 3, 4, 5), IMAGE_Y)),
    (lambda: T.CrossEntropyLoss(reduction="none", label_smoothing=0.2), ((5, 4), UNIT)),
    (lambda: T.NLLLoss(W3, ignore_index=1), ((2, 3, 4, 5), IMAGE_Y)),
    (lambda: T.MultiMarginLoss(2, 0.5, W3, reduction="sum"), ((5, 3), Y3.abs() % 3)),
    (lambda: T.BCELoss(W4, reduction="sum"), (UNIT, UNIT.flip(0))),
    (lambda: T.BCEWithLogitsLoss(W4, pos_weight=W4), ((5, 4), UNIT)),
    (lambda: T.MultiLabelSoftMarginLoss(W4), ((5, 4), UNIT)),
    (lambda: T.MSELoss(), ((5, 4), (5, 4))),
    (lambda: T.MSELoss(size_average=False), ((5, 4), (5, 4))),
    (lambda: T.L1Loss(reduction="none"), ((5, 4), (5, 4))),
    (lambda: T.SmoothL1Loss(beta=0.3), ((5, 4), (5, 4))),
    (lambda: T.HuberLoss(delta=0.3), ((5, 4), (5, 4))),
    (lambda: T.KLDivLoss(reduction="batchmean"), ((5, 4), UNIT)),
    (lambda: T.KLDivLoss(reduction="sum", log_target=True), ((5, 4), (5, 4))),
    (lambda: T.PoissonNLLLoss(False, True, eps=1e-3), (UNIT, UNIT * 5)),
    (lambda: T.GaussianNLLLoss(full=True, eps=0.5), ((5, 4), (5, 4), UNIT)),
    (lambda: T.SoftMarginLoss(), ((5, 4), ONES)),
    (lambda: T.HingeEmbeddingLoss(0.5), ((5, 4), ONES)),
    (lambda: T.MarginRankingLoss(0.5), ((5, 4), (5, 4), ONES)),
    (lambda: T.CosineEmbeddingLoss(0.1), ((5, 4), (5, 4), SIGN)),
    (lambda: T.TripletMarginLoss(2.0, 1.0, 1e-3, True), ((5, 4), (5, 4), (5, 4))),
]


class Beside(T.Module):
    """A model whose forward ends in a loss."""

    def __init__(self, loss: T.Module) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, x: Any, y: Any) -> Any:
        return self.loss(x * 1.0, y)


class BesideThree(Beside):
    def forward(self, x: Any, y: Any, z: Any) -> Any:  # type: ignore[override]
        return self.loss(x * 1.0, y, z)


def differentiable(layer: T.Module) -> bool:
    """In both inputs, in torch."""
    return not isinstance(layer, T.SoftMarginLoss)


@pytest.mark.parametrize(("make", "inputs"), LAYERS, ids=lambda v: type(v()).__name__ if callable(v) else "")
def test_layers_convert(make: Callable, inputs: Any) -> None:
    weights = dict(make().named_buffers())
    net = converts(
        (Beside if len(inputs) == 2 else BesideThree)(make()), *inputs, batch=False, gradient=differentiable(make())
    )
    layer = net.get_submodule("loss")
    assert type(layer) is getattr(nn, type(make()).__name__)
    for k, w in weights.items():
        close(getattr(layer, k), w, 0)


FUNCTIONS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "cross_entropy": (lambda x, y: F.cross_entropy(x, y, W3, ignore_index=2, label_smoothing=0.1), ((5, 3), Y3 % 3)),
    "cross_entropy-older": (lambda x, y: F.cross_entropy(x, y, None, False), ((5, 3), Y3)),
    "nll_loss": (lambda x, y: F.nll_loss(x.log_softmax(1), y, W3, reduction="none"), ((2, 3, 4, 5), IMAGE_Y)),
    "multi_margin_loss": (lambda x, y: F.multi_margin_loss(x, y % 3, 2, weight=W3), ((5, 3), Y3.abs())),
    "binary_cross_entropy": (lambda x, y: F.binary_cross_entropy(x.sigmoid(), y, W4), ((5, 4), UNIT)),
    "with_logits": (lambda x, y: F.binary_cross_entropy_with_logits(x, y, pos_weight=W4), ((5, 4), UNIT)),
    "multilabel": (lambda x, y: F.multilabel_soft_margin_loss(x, y, reduction="sum"), ((5, 4), UNIT)),
    "mse_loss": (lambda x, y: F.mse_loss(x, y, reduction="sum"), ((5, 4), (5, 4))),
    "mse_loss-older": (lambda x, y: F.mse_loss(x, y, None, False), ((5, 4), (5, 4))),
    "l1_loss": (lambda x, y: F.l1_loss(x, y), ((5, 4), (5, 4))),
    "smooth_l1_loss": (lambda x, y: F.smooth_l1_loss(x, y, beta=0.5), ((5, 4), (5, 4))),
    "huber_loss": (lambda x, y: F.huber_loss(x, y, "sum", 0.5), ((5, 4), (5, 4))),
    "kl_div": (lambda x, y: F.kl_div(x, y, reduction="batchmean"), ((5, 4), UNIT)),
    "poisson_nll_loss": (lambda x, y: F.poisson_nll_loss(x, y, full=True), ((5, 4), UNIT * 5)),
    "gaussian_nll_loss": (lambda x, y: F.gaussian_nll_loss(x, y, y + 0.1), ((5, 4), UNIT)),
    "soft_margin_loss": (lambda x, y: F.soft_margin_loss(x, y), ((5, 4), ONES)),
    "hinge_embedding_loss": (lambda x, y: F.hinge_embedding_loss(x, y, 0.5), ((5, 4), ONES)),
    "margin_ranking_loss": (lambda x, y: F.margin_ranking_loss(x, x * x, y, 0.5), ((5, 4), ONES)),
    "cosine_embedding_loss": (lambda x, y: F.cosine_embedding_loss(x, UNIT, y, 0.1), ((5, 4), SIGN)),
    "triplet_margin_loss": (lambda x, y: F.triplet_margin_loss(x, y, UNIT, swap=True), ((5, 4), (5, 4))),
    "ctc_loss": (
        lambda x, y: F.ctc_loss(x.log_softmax(2), y, torch.tensor([5, 4]), torch.tensor([2, 1])),
        ((5, 2, 4), torch.tensor([[1, 2], [3, 0]])),
    ),
    "torch.hinge": (lambda x, y: torch.hinge_embedding_loss(x, y, 0.5, 2), ((5, 4), ONES)),
    "torch.with_logits": (lambda x, y: torch.binary_cross_entropy_with_logits(x, y, W4, None, 0), ((5, 4), UNIT)),
}


class Called(T.Module):
    def __init__(self, f: Callable) -> None:
        super().__init__()
        self.f = f

    def forward(self, x: Any, y: Any) -> Any:
        return self.f(x, y)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_convert(name: str) -> None:
    f, inputs = FUNCTIONS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        converts(Called(f), *inputs, batch=False, gradient=name != "soft_margin_loss")


EXPORTED = [n for n in FUNCTIONS if n not in ("gaussian_nll_loss", "ctc_loss")]  # in which torch looks at values


@pytest.mark.parametrize("name", EXPORTED)
def test_exported_programs_convert(name: str) -> None:
    f, shapes = FUNCTIONS[name]
    inputs = tuple(torch.randn(s) if isinstance(s, tuple) else s for s in shapes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(Called(f), inputs)
    close(torch2needle.convert(program, inputs)(*inputs), Called(f)(*inputs))


WITHOUT_REDUCTION: dict[str, tuple[Any, ...]] = {  # what follows the input of shape (5, 4)
    "kl_div": (UNIT,),
    "binary_cross_entropy_with_logits": (UNIT,),
    "margin_ranking_loss": (UNIT, ONES),
    "hinge_embedding_loss": (ONES,),
    "cosine_embedding_loss": (UNIT, SIGN),
    "triplet_margin_loss": (UNIT, UNIT.flip(0)),
}


@pytest.mark.parametrize("name", WITHOUT_REDUCTION)
def test_torch_s_own_losses_give_every_loss_and_aten_s_the_mean(name: str) -> None:
    """Where the call says nothing: torch's schemas say the mean, and what parses the arguments of Python takes none."""
    x, (y, *rest) = torch.rand(5, 4, generator=torch.Generator().manual_seed(1)), WITHOUT_REDUCTION[name]
    for f, is_mean in ((getattr(torch, name), False), (getattr(torch.ops.aten, name).default, True)):
        model = Called(lambda x, y, f=f: f(x, y, *rest))
        want = model(x, y)
        assert (want.ndim == 0) is is_mean
        for example in (None, (x, y)):
            close(torch2needle.convert(model, example)(x, y), want)


class Recogniser(torch.nn.Module):
    """Of which only torch.export can follow the forward, and of a CTC loss it finds no shapes."""

    def __init__(self, lengths: str, **options: Any) -> None:
        super().__init__()
        self.head, self.lengths, self.options = torch.nn.Linear(4, 5), lengths, options

    def forward(self, x: torch.Tensor, labels: torch.Tensor, read: torch.Tensor) -> torch.Tensor:
        for _ in range(len(x)):
            x = x * 1.5
        log_probs = self.head(x).log_softmax(-1)
        written = torch.tensor([2, 1])
        if self.lengths == "numbers":
            return F.ctc_loss(log_probs, labels, (6, 6), [2, 1], **self.options)
        if self.lengths == "plain":
            return torch.ctc_loss(log_probs, labels, read, written, 0, 0)
        return torch.nn.CTCLoss(**self.options)(log_probs, labels, read, written)


@pytest.mark.parametrize(
    "lengths, options",
    [("numbers", {"reduction": "sum"}), ("plain", {}), ("layer", {"blank": 4, "zero_infinity": True})],
)
def test_ctc_losses_convert_where_torch_export_follows(lengths: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Recogniser(lengths, **options)
    inputs = torch.randn(6, 2, 4), torch.randint(1, 4, (2, 3)), torch.tensor([6, 4])
    net = torch2needle.convert(model, inputs)
    close(net(*inputs), model(*inputs))
    other = torch.randn(6, 2, 4), torch.randint(1, 4, (2, 3)), torch.tensor([5, 6])
    close(net(*other), model(*other))
