"""Sequences of calls of torch.compile(backend="needle"), with writes, updates and other shapes between them: as eager torch."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import torch2needle  # registers the backend

from .frame import Wrong

NAME, SAMPLE, FULL, SECONDS = "dynamo", 30, 2_000, 120
TOLERANCE = 1e-4  # relative to the largest value; training steps between the calls carry differences on


# -- modules -------------------------------------------------------------------------------------------------------------


def broken(x: Any) -> Any:
    print(end="")  # a graph break
    return x


def written(y: Any) -> Any:
    y[:, 0].fill_(1)
    return y


STEPS: dict[str, Callable[[Any, Any], Any]] = {
    "linear": lambda m, x: m.linear(x),
    "conv": lambda m, x: m.conv(x.unsqueeze(1)).mean(1),
    "norm": lambda m, x: m.norm(x),
    "batch norm": lambda m, x: m.bn(x.unsqueeze(1)).squeeze(1),
    "dropout": lambda m, x: m.dropout(x),
    "embedding": lambda m, x: x + m.embedding(torch.arange(x.shape[0]) % 5).unsqueeze(1),
    "relu": lambda m, x: x.relu(),
    "gelu": lambda m, x: F.gelu(x),
    "parameter": lambda m, x: x * m.scale,
    "buffer": lambda m, x: x + m.offset,
    "attribute": lambda m, x: x * m.plain,
    "closure": lambda m, x: x + CLOSURE,
    "tied": lambda m, x: F.linear(x, m.linear.weight.t()),
    "transpose": lambda m, x: (x * 2).transpose(1, 2).contiguous().transpose(1, 2),
    "strided": lambda m, x: (x + 1).transpose(1, 2).relu().transpose(1, 2),
    "break": lambda m, x: broken(x),
    "size": lambda m, x: x / x.shape[0],
    "in place": lambda m, x: (x * 1).add_(1).mul_(2),
    "slice write": lambda m, x: written(x * 1),
    "writes input": lambda m, x: x.mul_(2),
    "writes buffer": lambda m, x: (m.offset.add_(1), x + m.offset)[1],
    "softmax": lambda m, x: x.softmax(-1),
    "attention": lambda m, x: F.scaled_dot_product_attention(x, x, x),
    "no_grad": lambda m, x: m.without(x),
    "detach": lambda m, x: x.detach() * 2 + x,
    "double": lambda m, x: (x.double() * 2).float(),
    "item": lambda m, x: x * (2 if x.sum().item() > 0 else 3),
}

RESULTS: dict[str, Callable[[Any, Any], Any]] = {
    "y": lambda x, y: y,
    "transposed": lambda x, y: (y * 1).transpose(1, 2),
    "slice": lambda x, y: (y * 1)[:, ::2],
    "row and mean": lambda x, y: {"row": y[0] * 1, "mean": [y.mean(1), None, 3]},
    "twice": lambda x, y: (y, y),
    "view and y": lambda x, y: (y, y.view(-1)),
    "input": lambda x, y: (x, y),
    "view of the input": lambda x, y: (x[0], y),
    "expanded": lambda x, y: y[:1].expand(4, *y.shape[1:]),
    "flags": lambda x, y: (y > 0, y.argmax(-1)),
}

CLOSURE = torch.ones(6)


class Net(nn.Module):
    def __init__(self, case: dict[str, Any]) -> None:
        super().__init__()
        self.steps, self.result = case["steps"], case["result"]
        self.linear, self.conv, self.norm = nn.Linear(6, 6), nn.Conv2d(1, 2, 3, padding=1), nn.LayerNorm(6)
        self.bn, self.dropout, self.embedding = nn.BatchNorm2d(1), nn.Dropout(0.5), nn.Embedding(5, 6)
        self.scale = nn.Parameter(torch.rand(6) + 0.5)
        self.register_buffer("offset", torch.rand(6))
        self.plain = torch.rand(6)

    def without(self, x: Any) -> Any:
        with torch.no_grad():
            return self.linear(x)

    def forward(self, x: Any) -> Any:
        y = x
        for name in self.steps:
            y = STEPS[name](self, y)
        return RESULTS[self.result](x, y)


# -- what happens between calls ------------------------------------------------------------------------------------------


def stepped(make: Callable[..., Any], **options: Any) -> Callable[[Net], None]:
    def step(m: Net) -> None:
        optimizer = make(m.parameters(), lr=0.05, **options)
        for i, p in enumerate(m.parameters()):
            p.grad = torch.full_like(p, 0.1 * (i % 3 - 1))
        optimizer.step()
        optimizer.zero_grad()

    return step


def without_grad(f: Callable[[Net], Any]) -> Callable[[Net], None]:
    def act(m: Net) -> None:
        with torch.no_grad():
            f(m)

    return act


ACTS: dict[str, Callable[[Net], Any]] = {
    "nothing": lambda m: None,
    "SGD": stepped(torch.optim.SGD),
    "SGD fused": stepped(torch.optim.SGD, fused=True),
    "Adam fused": stepped(torch.optim.Adam, fused=True),
    "AdamW foreach": stepped(torch.optim.AdamW, foreach=True),
    "Adagrad": stepped(torch.optim.Adagrad),
    "data add": lambda m: m.linear.weight.data.add_(0.1),
    "data flip": lambda m: m.linear.weight.data.copy_(m.linear.weight.data.flip(0)),
    "data one": lambda m: m.linear.bias.data.__setitem__(2, 1.5),
    "data conv": lambda m: m.conv.weight.data.neg_(),
    "data buffer": lambda m: m.bn.running_mean.data.add_(0.5),
    "data embedding": lambda m: m.embedding.weight.data.mul_(2),
    "data norm": lambda m: m.norm.weight.data.mul_(1.5),
    "data is": lambda m: setattr(m.linear.weight, "data", m.linear.weight.data.t().clone()),
    "strided data": lambda m: setattr(m.linear.weight, "data", m.linear.weight.data.t()),
    "in place": without_grad(lambda m: m.scale.mul_(1.5)),
    "plain": lambda m: m.plain.add_(0.5),
    "another attribute": lambda m: setattr(m, "plain", m.plain * 2),
    "load": lambda m: m.load_state_dict({k: v + 1 if v.is_floating_point() else v for k, v in m.state_dict().items()}),
    "assign": lambda m: m.load_state_dict({k: v.clone() for k, v in m.state_dict().items()}, assign=True),
    "replace": lambda m: setattr(m.linear, "weight", nn.Parameter(m.linear.weight.detach() * 0.5)),
    "no bias": lambda m: setattr(m.linear, "bias", None),
    "eval": lambda m: m.eval(),
    "train": lambda m: m.train(),
    "freeze": lambda m: m.requires_grad_(False),
    "thaw": lambda m: m.requires_grad_(True),
    "eps": lambda m: setattr(m.norm, "eps", 0.1),
    "numpy": lambda m: m.linear.bias.detach().numpy().__setitem__(0, 2.0),
    "to double": lambda m: m.double(),
    "to float": lambda m: m.float(),
}
MODES = (*["no_grad"] * 8, "grad", "grad", "inference", "inference", "autocast")
SHAPES = [(3, 4, 6), (3, 4, 6), (5, 4, 6), (1, 4, 6), (3, 2, 6), (2, 7, 6)]
LAYOUTS = ("dense", "dense", "dense", "transposed", "sliced", "offset")


def draw(rng: random.Random) -> dict[str, Any]:
    steps = [rng.choice(list(STEPS)) for _ in range(rng.randint(1, 4))]
    # dropout draws from torch's generator, as eager torch does: the same seed before each call
    calls = [
        (rng.choice(list(ACTS)), rng.choice(MODES), rng.choice(SHAPES), rng.choice(LAYOUTS), rng.random() < 0.2)
        for _ in range(rng.randint(2, 5))
    ]
    result = "y" if rng.random() < 0.6 else rng.choice(list(RESULTS))
    return {"steps": steps, "result": result, "dynamic": rng.choice((None, None, True)), "calls": calls}


def smaller(case: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for key in ("calls", "steps"):
        for i in range(len(case[key])):
            if len(case[key]) > 1:
                yield case | {key: case[key][:i] + case[key][i + 1 :]}
    for i, (act, mode, shape, layout, grad) in enumerate(case["calls"]):
        for less in (
            ("nothing", mode, shape, layout, grad),
            (act, mode, (3, 4, 6), layout, grad),
            (act, "no_grad", shape, layout, False),
            (act, mode, shape, "dense", grad),
        ):
            if less != case["calls"][i]:
                yield case | {"calls": [*case["calls"][:i], less, *case["calls"][i + 1 :]]}
    if case["result"] != "y":
        yield case | {"result": "y"}


# -- checking ------------------------------------------------------------------------------------------------------------


def drawn_input(shape: tuple, layout: str, number: int) -> torch.Tensor:
    values = torch.sin(torch.arange(2.0 * shape[0] * shape[1] * shape[2] + 3) * (number + 1))
    n = shape[0] * shape[1] * shape[2]
    if layout == "transposed":
        return values[:n].view(shape[0], shape[2], shape[1]).transpose(1, 2)
    if layout == "sliced":
        return values[: 2 * n].view(shape[0], 2 * shape[1], shape[2])[:, ::2]
    return values[3 : n + 3].view(shape) if layout == "offset" else values[:n].view(shape)


def called(f: Callable, m: Net, x: torch.Tensor, mode: str, grad: bool) -> tuple[Any, Any]:
    """Result and gradients, or the error's type."""
    torch.manual_seed(1)
    x = x.requires_grad_(grad and mode == "grad")
    context = {
        "no_grad": torch.no_grad(), "grad": torch.enable_grad(), "inference": torch.inference_mode(),
        "autocast": torch.autocast("cpu", torch.bfloat16),
    }[mode]  # fmt: skip
    m.zero_grad()
    with context:
        y = f(x if not x.requires_grad else x * 1)
    grads: list[Any] = []
    tensors = [t for t in leaves(y) if t.requires_grad]
    if tensors:
        sum((t.float() * torch.cos(torch.arange(t.numel()).float()).view(t.shape)).sum() for t in tensors).backward()
        grads = [x.grad, *[p.grad for p in m.parameters()]]
    return y, grads


def leaves(y: Any) -> list[torch.Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(y) if isinstance(t, torch.Tensor)]


def check(case: dict[str, Any]) -> str:
    warnings.simplefilter("ignore")
    torch._dynamo.reset()
    torch2needle.dynamo.SAID.clear()
    torch.manual_seed(0)
    theirs = Net(case).eval()
    ours = copy.deepcopy(theirs)
    compiled = torch.compile(ours, backend="needle", dynamic=case["dynamic"])
    for i, (act, mode, shape, layout, grad) in enumerate(case["calls"]):
        try:
            ACTS[act](theirs)
        except Exception:
            return "torch raises"
        ACTS[act](ours)
        inputs = [drawn_input(shape, layout, i) for _ in range(2)]
        state = copy.deepcopy(theirs.state_dict())
        try:
            want = called(theirs, theirs, inputs[0], mode, grad)
        except Exception:
            theirs.load_state_dict(state)
            continue
        got = called(compiled, ours, inputs[1], mode, grad)
        where = f"call {i}"
        same(f"{where}, result", got[0], want[0], True)
        same(f"{where}, gradient", got[1], want[1], False)
        same(f"{where}, input", inputs[1].detach(), inputs[0].detach(), False)
        same(f"{where}, state", ours.state_dict(), theirs.state_dict(), False)
    said = torch2needle.dynamo.SAID
    return "agrees" if not said else f"agrees, torch runs: {min(said)}"


def same(where: str, ours: Any, theirs: Any, layout: bool) -> None:
    a, b = torch.utils._pytree.tree_flatten(ours), torch.utils._pytree.tree_flatten(theirs)
    if a[1] != b[1]:
        raise Wrong(f"{where}: {a[1]} instead of {b[1]}")
    for p, q in zip(a[0], b[0], strict=True):
        if not isinstance(q, torch.Tensor):
            if p != q:
                raise Wrong(f"{where}: {p!r} instead of {q!r}")
            continue
        facts = [(t.shape, t.dtype, t.requires_grad, t.is_inference(), t.stride() if layout else ()) for t in (p, q)]
        if facts[0] != facts[1]:
            raise Wrong(f"{where}: {facts[0]} instead of {facts[1]}")
        p, q = p.detach().double(), q.detach().double()
        tolerance = 0.05 if facts[0][1] == torch.bfloat16 else TOLERANCE
        scale = max(1.0, float(q.abs().max())) if q.numel() else 1.0
        if not torch.allclose(p, q, rtol=0, atol=tolerance * scale, equal_nan=True):
            raise Wrong(f"{where}: differs by {float((p - q).abs().max()):.3g} of {scale:.3g}")
    counts = [len({t.untyped_storage()._cdata for t in v if isinstance(t, torch.Tensor)}) for v in (a[0], b[0])]
    if layout and counts[0] != counts[1]:
        raise Wrong(f"{where}: {counts[0]} storages instead of {counts[1]}")
