"""What stands around tensors in users' models: classes of results and inputs, options, members that are functions, hooks."""

from __future__ import annotations

import enum
import functools
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Gaussian = namedtuple("Gaussian", ["mean", "log_var"])


class Loss(NamedTuple):
    """With fields that may be absent, and in another order than the forward makes them."""

    total: Tensor
    reconstruction: Tensor
    divergence: Tensor
    extra: Tensor | None = None


class VariationalAutoencoder(nn.Module):
    """Kingma and Welling 2014, at the mean, with named tuples inside of tuples. (N, 12)."""

    def __init__(self, width: int = 12, code: int = 3) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(width, 16), nn.Tanh())
        self.mean, self.log_var = nn.Linear(16, code), nn.Linear(16, code)
        self.decoder = nn.Sequential(nn.Linear(code, 16), nn.Tanh(), nn.Linear(16, width))

    def forward(self, x: Tensor) -> tuple[Tensor, Gaussian, Loss]:
        h = self.encoder(x)
        q = Gaussian(log_var=self.log_var(h), mean=self.mean(h))
        y = self.decoder(q.mean)
        divergence = -0.5 * torch.sum(1 + q.log_var - q.mean.pow(2) - q.log_var.exp(), dim=1)
        reconstruction = F.mse_loss(y, x, reduction="none").sum(1)
        return y, q, Loss(divergence=divergence, reconstruction=reconstruction, total=divergence + reconstruction)


@dataclass
class SegmentationOutput:
    logits: Tensor
    features: list[Tensor] = field(default_factory=list)
    auxiliary: Tensor | None = None


class Segmenter(nn.Module):
    """A dataclass with a list and an absent field. Images."""

    def __init__(self, width: int = 8, classes: int = 3) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, 2, 1), nn.BatchNorm2d(b), nn.ReLU())
            for a, b in ((3, width), (width, 2 * width))
        )
        self.head = nn.Conv2d(2 * width, classes, 1)
        self.aux = nn.Conv2d(width, classes, 1)

    def forward(self, image: Tensor) -> SegmentationOutput:
        features = []
        x = image
        for stage in self.stages:
            x = stage(x)
            features.append(x)
        logits = F.interpolate(self.head(x), size=image.shape[-2:], mode="bilinear", align_corners=False)
        return SegmentationOutput(logits, features, auxiliary=self.aux(features[0]) if self.training else None)


class Sample(NamedTuple):
    tokens: Tensor
    image: Tensor


class TwoTowers(nn.Module):
    """CLIP's towers over a named tuple of inputs; a dict of dicts comes out."""

    def __init__(self, words: int = 20, dim: int = 8) -> None:
        super().__init__()
        self.text, self.vision = nn.EmbeddingBag(words, dim, mode="mean"), nn.Conv2d(3, dim, 4, 4)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, batch: Sample) -> dict[str, Any]:
        text = F.normalize(self.text(batch.tokens), dim=-1)
        image = F.normalize(self.vision(batch.image).mean((2, 3)), dim=-1)
        logits = self.scale.exp() * text @ image.t()
        return {"logits": {"text": logits, "image": logits.t()}, "embeddings": OrderedDict(image=image, text=text)}


@dataclass
class Scene:
    points: Tensor
    camera: Tensor
    names: tuple[str, ...] = ()


class SceneEncoder(nn.Module):
    """A dataclass as the input. Points (N, P, 3), cameras (N, 3, 4)."""

    def __init__(self, hidden: int = 8) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(2, hidden), nn.ReLU(), nn.Linear(hidden, hidden))

    def forward(self, scene: Scene) -> Tensor:
        homogeneous = F.pad(scene.points, (0, 1), value=1.0)
        seen = homogeneous @ scene.camera.transpose(1, 2)
        return self.mlp(seen[..., :2] / seen[..., 2:].abs().clamp(min=0.1)).amax(1)


class NestedBatch(nn.Module):
    """A dict of dicts and a list as the input, as collate functions make it; keys that a class does not know pass through."""

    def __init__(self, dim: int = 6) -> None:
        super().__init__()
        self.towers = nn.ModuleDict({"user": nn.Linear(4, dim), "item": nn.Linear(3, dim)})
        self.history = nn.Linear(3, dim)

    def forward(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        user = self.towers["user"](batch["features"]["user"])
        item = self.towers["item"](batch["features"]["item"])
        past = torch.stack([self.history(h) for h in batch["history"]]).mean(0)
        return {**batch["features"], "score": (user * (item + past)).sum(-1)}


class Scoring(str, enum.Enum):
    DOT = "dot"
    ADDITIVE = "additive"


class Reduction(enum.IntEnum):
    MEAN = 0
    LAST = 1


class Luong(nn.Module):
    """Scores and reductions chosen by enums; members are partials, lambdas and methods. (N, L, 6), (N, 6)."""

    def __init__(self, dim: int = 6, activation: Callable | None = None) -> None:
        super().__init__()
        self.activation = activation or functools.partial(F.leaky_relu, negative_slope=0.3)
        self.project = nn.ModuleDict({s.value: nn.Linear(dim, dim) for s in Scoring})
        self.vector = nn.Linear(dim, 1)
        self.scores: dict[Scoring, Callable] = {
            Scoring.DOT: lambda q, k: (q[:, None] * k).sum(-1),
            Scoring.ADDITIVE: self.additive,
        }
        self.reduce = {Reduction.MEAN: lambda v: v.mean(1), Reduction.LAST: lambda v: v[:, -1]}

    def additive(self, q: Tensor, k: Tensor) -> Tensor:
        return self.vector(torch.tanh(q[:, None] + k)).squeeze(-1)

    def forward(self, x: Tensor, query: Tensor, scoring: Scoring = Scoring.ADDITIVE, reduction: int = 1) -> Tensor:
        keys = self.activation(self.project[scoring.value](x))
        weights = self.scores[Scoring(scoring)](query, keys).softmax(1)
        return self.reduce[Reduction(reduction)](x * weights.unsqueeze(-1))


class MultiTask(nn.Module):
    """Heads in a ModuleDict, chosen by a string or all of them; a lambda layer and **options on the way. Images."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, width, 3, 2, 1), nn.ReLU())
        self.heads = nn.ModuleDict({"depth": nn.Conv2d(width, 1, 1), "normal": nn.Conv2d(width, 3, 1)})
        self.finish = {"depth": F.softplus, "normal": functools.partial(F.normalize, dim=1)}

    def forward(self, image: Tensor, tasks: str = "all", **options: Any) -> dict[str, Tensor]:
        x = self.body(image)
        names = list(self.heads) if tasks == "all" else tasks.split(",")
        size = options.get("size", image.shape[-2:])
        return {n: F.interpolate(self.finish[n](self.heads[n](x)), size=size, mode="nearest") for n in names}


class Features(nn.Module):
    """Keeps what layers give in a dict by forward hooks, and returns it. Images."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, 2, 1), nn.Sigmoid()
        )
        self.kept: dict[str, Tensor] = {}
        for name in ("1", "3"):
            self.net.get_submodule(name).register_forward_hook(functools.partial(self.keep, name))

    def keep(self, name: str, module: nn.Module, args: Any, output: Tensor) -> None:
        self.kept[name] = output

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        self.kept.clear()
        self.net(x)
        return dict(self.kept)


class CellStack(nn.Module):
    """Cells of three kinds by hand, one above the other: states in lists, zoneout in training. (N, L, 4)."""

    def __init__(self, dim: int = 4, hidden: int = 6, zoneout: float = 0.1) -> None:
        super().__init__()
        self.lstm, self.gru, self.rnn = nn.LSTMCell(dim, hidden), nn.GRUCell(hidden, hidden), nn.RNNCell(hidden, hidden)
        self.zoneout, self.hidden = zoneout, hidden

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        state: Any = None
        h = [torch.zeros(x.size(0), self.hidden, dtype=x.dtype) for _ in range(2)]
        out = []
        for step in torch.unbind(x, dim=1):
            state = self.lstm(step, state)
            new = [self.gru(state[0], h[0])]
            new.append(self.rnn(new[0], h[1]))
            if self.training:
                h = [torch.where(torch.rand_like(a) < self.zoneout, a, b) for a, b in zip(h, new, strict=True)]
            else:
                h = [self.zoneout * a + (1 - self.zoneout) * b for a, b in zip(h, new, strict=True)]
            out.append(h[-1])
        return torch.stack(out, 1), h
