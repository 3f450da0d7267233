"""Aten calls of exported programs against torch, and models of libraries."""

from __future__ import annotations

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402

import needle as ndl  # noqa: E402
import torch2needle  # noqa: E402
from conversion import Calls, close  # noqa: E402

# Functions of one (2, 3, 4, 4) tensor, whose aten calls are held against torch.
CALLS: list[Callable] = [
    lambda x: x[:, 1:, ::2, -1] + x[0, None, 1:, 0, :2],
    lambda x: x[:, [0, 2]] - x[:, torch.tensor([1, 1])],
    lambda x: torch.cat([torch.empty(0), x, x * 2], dim=-1),
    lambda x: F.interpolate(x, scale_factor=2) + F.interpolate(x, size=(8, 8), mode="bilinear", align_corners=True),
    lambda x: F.interpolate(x, scale_factor=2.0, mode="bicubic"),
    lambda x: F.pad(x, (1, 1, 0, 2), value=2.0).sum((0, 2)),
    lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect") * F.pad(x, (2, 0, 0, 2), mode="replicate"),
    lambda x: F.fold(F.unfold(x, 2, stride=2), (4, 4), 2, stride=2),
    lambda x: F.adaptive_max_pool2d(x, 2) + F.adaptive_avg_pool2d(x, (2, 2)) - F.avg_pool2d(x, 2) * F.max_pool2d(x, 2),
    lambda x: torch.split(x, [1, 2], dim=1)[1] + x.split(2, dim=1)[0] + x.chunk(3, 1)[2] * x.unbind(1)[0][:, None],
    lambda x: x.swapaxes(1, 2).movedim(0, 3).transpose(0, -1).flip(0).roll(1, 2).reshape(2, -1),
    lambda x: torch.baddbmm(x[0], x[1], x[0], beta=0.5, alpha=2) + torch.einsum("bij,bjk->bik", x[0], x[1]),
    lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True, scale=0.3),
    lambda x: F.embedding(torch.tensor([[0, 1], [1, 0]]), x[:, 0, 0]) + F.layer_norm(x[0, 0], (4,))[:2],
    lambda x: F.group_norm(x, 3, eps=0.1) + F.instance_norm(x) + F.batch_norm(x, None, None, training=True),
    lambda x: F.gelu(x, approximate="tanh") + F.elu(x, 0.5) + F.hardtanh(x, -0.5, 0.5) + F.softplus(x, 2),
    lambda x: x.clamp(-0.5).clamp_max(0.5).pow(2) + 2**x + x.abs().rsqrt() + x.sub(1, alpha=2) + torch.rsub(x, 1),
    lambda x: x.var(1, correction=0) + x.std(dim=1) + x.amax(1) + x.max(1).values + x.mean(1) + x.logsumexp(1),
    lambda x: torch.where(x > 0, x, 0.5) + x.masked_fill(x < -1, 3.0) + (x > 0).float() + torch.zeros_like(x),
    lambda x: x.view(2, -1).softmax(-1).cumsum(1) + x.flatten(1).argsort(1) + torch.arange(48) + x.new_ones(2, 48),
    lambda x: x.expand(2, 3, 4, 4).repeat(1, 2, 1, 1).unflatten(1, (3, 2)).squeeze(0).tril(1) * torch.full((4,), 2.0),
    lambda x: x.to(torch.float64).to(x.dtype) + x.float().type_as(x) + x.detach() + x.clone().contiguous(),
    lambda x: (
        torch.linalg.vector_norm(x, 3, dim=(1, 2)) + x.norm(dim=(1, 3)) + torch.addmm(x[0, 0, 0], x[0, 1, :2], x[1, 1])
    ),
]


@pytest.mark.parametrize("f", CALLS, ids=[str(i) for i in range(len(CALLS))])
def test_aten_calls(f: Callable) -> None:
    torch.manual_seed(1)
    x = torch.randn(2, 3, 4, 4)
    net = torch2needle.convert(torch.export.export(Calls(f), (x,), strict=False))
    assert net.report.capture == "torch.export"
    close(net(x), f(x))
    close(ndl.compile(net, x)(x), f(x))


def drawn_and_replaced(x: torch.Tensor) -> torch.Tensor:
    layer = torch.nn.Linear(4, 4)  # draws its weights
    layer.weight = torch.nn.Parameter(torch.ones(4, 4), requires_grad=False)
    torch.rand(3).random_()
    return F.linear(x, layer.weight) * x.split(2, -1)[0].sum()


def written_and_read_before(x: torch.Tensor) -> torch.Tensor:
    a, b = torch.zeros(4), torch.zeros(4)
    a.add_(x[0, 0, 0])
    y = x * a
    b.copy_(y[0, 0, 0])
    a.mul_(b)
    return y + a[1:2] + x.new_zeros(4).add_(1).sum() * torch.ones_like(x)[0].mul_(2)


@pytest.mark.parametrize("f", [drawn_and_replaced, written_and_read_before])
def test_what_nothing_reads_is_left_out(f: Callable) -> None:
    x = torch.randn(2, 3, 4, 4)
    net = torch2needle.convert(torch.export.export(Calls(f), (x,), strict=False))
    close(net(x), f(x))


class Classes(torch.nn.Module):
    def __init__(self, head_bias: bool) -> None:
        super().__init__()
        self.words = torch.nn.AdaptiveLogSoftmaxWithLoss(8, 20, [5, 12], head_bias=head_bias)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple:
        found = self.words(x, y)
        return found.output, found.loss, self.words.log_prob(x)


EXAMPLES = {"every cluster": [0, 4, 5, 11, 12, 19], "the head": [0, 4, 3], "a cluster": [13, 19, 12, 15]}


@pytest.mark.parametrize("labels", EXAMPLES)
@pytest.mark.parametrize("head_bias", [False, True])
def test_an_adaptive_softmax(head_bias: bool, labels: str) -> None:
    """Torch's asks which rows are of which cluster, whatever clusters the example has."""
    model = Classes(head_bias).eval()
    example = EXAMPLES[labels]
    net = torch2needle.convert(model, (torch.randn(len(example), 8), torch.tensor(example)))
    for y in ([1, 7, 13, 0], [0, 1], [19, 18, 17]):
        x, y = torch.randn(len(y), 8), torch.tensor(y)
        for got, want in zip(net(x, y), model(x, y), strict=True):
            close(got, want)
    _, loss, _ = net(x, y)
    loss.backward()
    model(x, y)[1].backward()
    for name, p in model.named_parameters():
        close(net.tensor(name).grad, torch.zeros_like(p) if p.grad is None else p.grad)


def test_an_adaptive_softmax_alone() -> None:
    model = torch.nn.AdaptiveLogSoftmaxWithLoss(8, 20, [5, 12])
    given = torch.randn(6, 8), torch.tensor([0, 4, 5, 11, 12, 19])
    for got, want in zip(torch2needle.convert(model, given)(*given), model(*given), strict=True):
        close(got, want)


@pytest.mark.parametrize("name", ["Bert", "GPT2"])
def test_transformers(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 50}
    extra = {"bos_token_id": 0, "eos_token_id": 0} if name == "GPT2" else {"intermediate_size": 64}
    try:
        model = getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**sizes, **extra)).eval()
    except (ImportError, RuntimeError) as e:  # its import of torchvision, built for another torch
        pytest.skip(str(e).split("\n")[0])
    ids = torch.randint(0, 50, (1, 7))
    net = torch2needle.convert(model, {"input_ids": ids})
    assert list(net.state_dict()) == list(model.state_dict())
    for batch in (1, 3):
        ids = torch.randint(0, 50, (batch, 7))
        got, want = net(input_ids=ids), model(input_ids=ids)
        assert list(got) == list(want)
        close(got["last_hidden_state"], want.last_hidden_state)


def test_timm() -> None:
    try:
        timm = pytest.importorskip("timm")
    except RuntimeError as e:
        pytest.skip(str(e))
    model = timm.create_model("mobilevit_s", pretrained=False).eval()
    x = torch.randn(1, 3, 64, 64)
    net = torch2needle.convert(model, x)
    for batch in (1, 2):
        x = torch.randn(batch, 3, 64, 64)
        close(net(x), model(x))


MOVES: dict[str, Callable] = {
    "a layer": lambda self, x: self.layer.to(x.device)(x),
    "itself": lambda self, x: self.to(x).layer(x),
    "in place": lambda self, x: setattr(self, "layer", self.layer.to(x.dtype)) or self.layer(x),
}


@pytest.mark.parametrize("name", MOVES)
def test_modules_that_are_moved_to_where_they_are(name: str) -> None:
    class Moves(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return MOVES[name](self, x)

    model = Moves().eval()
    net = torch2needle.convert(model, (torch.randn(5, 4),))
    x = torch.randn(3, 4)
    close(net(x), model(x))
