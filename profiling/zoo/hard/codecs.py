"""Codes and boxes: quantised autoencoders, detectors up to their boxes, heads of connectionist temporal classification."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class VectorQuantised(nn.Module):
    """VQ-VAE (van den Oord et al. 2017): nearest codes, straight-through, commitment and perplexity. Images."""

    def __init__(self, codes: int = 16, dim: int = 6, beta: float = 0.25) -> None:
        super().__init__()
        self.beta = beta
        self.encoder = nn.Sequential(nn.Conv2d(3, dim, 4, 2, 1), nn.ReLU(), nn.Conv2d(dim, dim, 3, padding=1))
        self.codebook = nn.Embedding(codes, dim)
        self.decoder = nn.Sequential(nn.ConvTranspose2d(dim, 8, 4, 2, 1), nn.ReLU(), nn.Conv2d(8, 3, 3, padding=1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        z = self.encoder(x).permute(0, 2, 3, 1).contiguous()
        flat = z.view(-1, z.shape[-1])
        w = self.codebook.weight
        d = (flat**2).sum(1, keepdim=True) + (w**2).sum(1) - 2 * torch.matmul(flat, w.t())
        index = torch.argmin(d, dim=1).unsqueeze(1)
        one_hot = torch.zeros(index.shape[0], w.shape[0], dtype=d.dtype)
        one_hot.scatter_(1, index, 1)
        q = torch.matmul(one_hot, w).view(z.shape)
        loss = F.mse_loss(q.detach(), z) * self.beta + F.mse_loss(q, z.detach())
        q = z + (q - z).detach()
        used = one_hot.mean(dim=0)
        perplexity = torch.exp(-torch.sum(used * torch.log(used + 1e-10)))
        return self.decoder(q.permute(0, 3, 1, 2)), loss, perplexity, index.view(z.shape[:-1])


class ResidualCodec(nn.Module):
    """EnCodec's quantiser (Défossez et al. 2022): codebooks in buffers, each for the rest of the one before. (N, 1, L)."""

    def __init__(self, dim: int = 8, books: int = 3, codes: int = 12) -> None:
        super().__init__()
        norm = nn.utils.parametrizations.weight_norm
        self.encoder = nn.Sequential(norm(nn.Conv1d(1, dim, 4, 2, 1)), nn.ELU(), norm(nn.Conv1d(dim, dim, 4, 2, 1)))
        self.decoder = nn.Sequential(
            norm(nn.ConvTranspose1d(dim, dim, 4, 2, 1)), nn.ELU(), norm(nn.ConvTranspose1d(dim, 1, 4, 2, 1))
        )
        self.register_buffer("books", torch.randn(books, codes, dim) / 2)

    def forward(self, wave: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rest = self.encoder(wave).transpose(1, 2)
        total, codes, losses = torch.zeros_like(rest), [], []
        for book in self.books:
            index = torch.cdist(rest, book[None]).argmin(-1)
            q = F.embedding(index, book)
            losses.append((rest - q.detach()).pow(2).mean())
            q = rest + (q - rest).detach()
            rest, total = rest - q.detach(), total + q
            codes.append(index)
        return self.decoder(total.transpose(1, 2)), torch.stack(codes, 1), torch.stack(losses).sum()


def round_ste(z: Tensor) -> Tensor:
    return z + (z.round() - z).detach()


class FiniteScalars(nn.Module):
    """FSQ (Mentzer et al. 2023): bounded, rounded, and numbered by mixed radix. (N, L, 3)."""

    def __init__(self, levels: tuple[int, ...] = (7, 5, 5)) -> None:
        super().__init__()
        self.project = nn.Linear(3, len(levels))
        self.register_buffer("levels", torch.tensor(levels, dtype=torch.int32), persistent=False)
        basis = torch.cumprod(torch.tensor([1, *levels[:-1]]), dim=0, dtype=torch.int32)
        self.register_buffer("basis", basis, persistent=False)

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        z = self.project(z)
        half = (self.levels - 1) * (1 + 1e-3) / 2
        offset = torch.where(self.levels % 2 == 0, 0.5, 0.0)
        shift = (offset / half).atanh()
        codes = round_ste((z + shift).tanh() * half - offset) / (self.levels // 2)
        half_width = self.levels // 2
        index = ((codes * half_width + half_width) * self.basis).sum(dim=-1).to(torch.int32)
        return codes, index


class Snake(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.rand(1, channels, 1) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.alpha + 1e-9).reciprocal() * torch.sin(self.alpha * x).pow(2)


class Vocoder(nn.Module):
    """BigVGAN's generator block (Lee et al. 2023): transposed convolutions, snakes, anti-aliasing by fixed filters. (N, 4, L)."""

    def __init__(self, mels: int = 4, width: int = 8) -> None:
        super().__init__()
        self.pre = nn.utils.weight_norm(nn.Conv1d(mels, width, 7, 1, 3))
        self.up = nn.utils.weight_norm(nn.ConvTranspose1d(width, width // 2, 4, 2, padding=1))
        self.blocks = nn.ModuleList(
            nn.ModuleList([Snake(width // 2), nn.Conv1d(width // 2, width // 2, 3, dilation=d, padding=d)])
            for d in (1, 3)
        )
        self.register_buffer("filter", torch.kaiser_window(5, False, 4.0).view(1, 1, -1) / 4)
        self.post = nn.Conv1d(width // 2, 1, 7, 1, 3, bias=False)

    def forward(self, mel: Tensor) -> Tensor:
        x = self.up(F.leaky_relu(self.pre(mel), 0.1))
        c = x.size(1)
        total = None
        for act, conv in self.blocks:
            y = F.pad(x, (2, 2), mode="replicate")
            y = F.conv1d(y, self.filter.expand(c, -1, -1), groups=c)
            y = conv(act(y)) + x
            total = y if total is None else total + y
        return torch.clamp(self.post(total / len(self.blocks)), min=-1.0, max=1.0)


class MuLawTransformer(nn.Module):
    """Waves companded to codes inside of the model, an embedding of them, and the waves back. (N, L) in -1 ... 1."""

    def __init__(self, codes: int = 32, dim: int = 8) -> None:
        super().__init__()
        self.mu, self.embed, self.head = codes - 1, nn.Embedding(codes, dim), nn.Linear(dim, codes)

    def forward(self, wave: Tensor) -> tuple[Tensor, Tensor]:
        mu = torch.tensor(self.mu, dtype=wave.dtype)
        x = torch.sign(wave) * torch.log1p(mu * torch.abs(wave)) / torch.log1p(mu)
        codes = ((x + 1) / 2 * mu + 0.5).to(torch.int64)
        logits = self.head(self.embed(codes))
        y = (logits.softmax(-1) * torch.linspace(-1, 1, self.mu + 1)).sum(-1)
        return torch.sign(y) * (torch.exp(torch.abs(y) * torch.log1p(mu)) - 1) / mu, logits


class AnchorDetector(nn.Module):
    """RetinaNet without suppression: anchors of each level made in the forward, deltas decoded and clipped. Images."""

    def __init__(self, width: int = 8, classes: int = 3) -> None:
        super().__init__()
        self.stem, self.down = nn.Conv2d(3, width, 8, 8), nn.Conv2d(width, width, 3, 2, 1)
        self.ratios, self.sizes = (0.5, 1.0, 2.0), (16, 32)
        self.cls, self.box = nn.Conv2d(width, 3 * classes, 3, padding=1), nn.Conv2d(width, 12, 3, padding=1)
        self.classes = classes

    def anchors(self, size: int, grid: torch.Size, image: torch.Size) -> Tensor:
        ratios = torch.tensor(self.ratios)
        h, w = size * ratios.sqrt(), size / ratios.sqrt()
        base = torch.stack([-w, -h, w, h], dim=1) / 2
        ys = torch.arange(grid[0], dtype=torch.float32) * (image[0] // grid[0])
        xs = torch.arange(grid[1], dtype=torch.float32) * (image[1] // grid[1])
        y, x = torch.meshgrid(ys, xs, indexing="ij")
        shifts = torch.stack((x.reshape(-1), y.reshape(-1), x.reshape(-1), y.reshape(-1)), dim=1)
        return (shifts.view(-1, 1, 4) + base.view(1, -1, 4)).reshape(-1, 4)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        n, first = images.shape[0], F.relu(self.stem(images))
        levels = [first, F.relu(self.down(first))]
        boxes, scores = [], []
        for size, f in zip(self.sizes, levels, strict=True):
            anchor = self.anchors(size, f.shape[-2:], images.shape[-2:])
            delta = self.box(f).view(n, 3, 4, *f.shape[-2:]).permute(0, 3, 4, 1, 2).reshape(n, -1, 4)
            logits = self.cls(f).view(n, 3, self.classes, *f.shape[-2:]).permute(0, 3, 4, 1, 2)
            wh = anchor[:, 2:] - anchor[:, :2]
            center = anchor[:, :2] + wh / 2 + delta[..., :2] * wh
            half = wh * torch.exp(delta[..., 2:].clamp(max=math.log(1000.0 / 16))) / 2
            box = torch.cat([center - half, center + half], -1)
            x, y = box[..., 0::2].clamp(0, images.shape[-1]), box[..., 1::2].clamp(0, images.shape[-2])
            boxes.append(torch.stack((x, y), dim=box.dim()).reshape(box.shape))
            scores.append(logits.reshape(n, -1, self.classes).sigmoid())
        return {"boxes": torch.cat(boxes, 1), "scores": torch.cat(scores, 1)}


class CenterPoints(nn.Module):
    """CenterNet's decoding (Zhou et al. 2019): peaks by max pooling, the best of all classes, boxes gathered there. Images."""

    def __init__(self, classes: int = 3, k: int = 5) -> None:
        super().__init__()
        self.k, self.body = k, nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.ReLU())
        self.heat, self.size, self.offset = nn.Conv2d(8, classes, 1), nn.Conv2d(8, 2, 1), nn.Conv2d(8, 2, 1)

    def gather(self, feature: Tensor, index: Tensor) -> Tensor:
        feature = feature.permute(0, 2, 3, 1).contiguous().view(feature.size(0), -1, feature.size(1))
        return feature.gather(1, index.unsqueeze(2).expand(index.size(0), index.size(1), feature.size(2)))

    def forward(self, x: Tensor) -> Tensor:
        f = self.body(x)
        heat = self.heat(f).sigmoid_()
        peaks = F.max_pool2d(heat, (3, 3), stride=1, padding=1)
        heat = heat * (peaks == heat).float()
        n, c, h, w = heat.size()
        scores, index = torch.topk(heat.view(n, c, -1), self.k)
        index = index % (h * w)
        score, best = torch.topk(scores.view(n, -1), self.k)
        kind = torch.div(best, self.k, rounding_mode="floor")
        index = index.view(n, -1).gather(1, best)
        at = torch.stack([(index % w).float(), torch.div(index, w, rounding_mode="trunc").float()], -1)
        center = at + self.gather(self.offset(f), index)
        half = self.gather(self.size(f).exp(), index) / 2
        return torch.cat([center - half, center + half, score.unsqueeze(-1), kind.unsqueeze(-1).float()], 2)


class YoloHead(nn.Module):
    """YOLOv8's head: bins of distances by softmax (DFL), grids kept between calls and made anew for another size. Images."""

    def __init__(self, classes: int = 4, bins: int = 5) -> None:
        super().__init__()
        self.bins, self.strides = bins, (8, 16)
        self.stem, self.down = nn.Conv2d(3, 8, 8, 8), nn.Conv2d(8, 8, 3, 2, 1)
        self.box = nn.ModuleList(nn.Conv2d(8, 4 * bins, 1) for _ in self.strides)
        self.cls = nn.ModuleList(nn.Conv2d(8, classes, 1) for _ in self.strides)
        self.shape: torch.Size | None = None
        self.points, self.steps = torch.empty(0), torch.empty(0)

    def make(self, maps: list[Tensor]) -> tuple[Tensor, Tensor]:
        points, steps = [], []
        for x, stride in zip(maps, self.strides, strict=True):
            h, w = x.shape[2:]
            sy, sx = torch.arange(h, dtype=x.dtype) + 0.5, torch.arange(w, dtype=x.dtype) + 0.5
            sy, sx = torch.meshgrid(sy, sx, indexing="ij")
            points.append(torch.stack((sx, sy), -1).view(-1, 2))
            steps.append(torch.full((h * w, 1), stride, dtype=x.dtype))
        return torch.cat(points).transpose(0, 1), torch.cat(steps).transpose(0, 1)

    def forward(self, x: Tensor) -> Tensor:
        n, first = x.shape[0], F.silu(self.stem(x))
        maps = [first, F.silu(self.down(first))]
        if self.shape != x.shape:
            self.points, self.steps = self.make(maps)
            self.shape = x.shape
        both = [torch.cat((b(m), c(m)), 1) for m, b, c in zip(maps, self.box, self.cls, strict=True)]
        box, cls = torch.cat([b.view(n, b.shape[1], -1) for b in both], 2).split(
            (4 * self.bins, self.cls[0].out_channels), 1
        )
        box = box.view(n, 4, self.bins, -1).transpose(2, 1).softmax(1)
        distance = (box * torch.arange(self.bins, dtype=x.dtype).view(1, -1, 1, 1)).sum(1)
        lt, rb = distance.chunk(2, 1)
        a, b = self.points.unsqueeze(0) - lt, self.points.unsqueeze(0) + rb
        return torch.cat((torch.cat(((a + b) / 2, b - a), 1) * self.steps, cls.sigmoid()), 1)


class SetDetector(nn.Module):
    """DETR (Carion et al. 2020): learned queries over an encoded map, boxes of the last and of every decoder layer. Images."""

    def __init__(self, dim: int = 8, queries: int = 5, classes: int = 4) -> None:
        super().__init__()
        self.backbone = nn.Conv2d(3, dim, 8, 8)
        self.row, self.column = nn.Parameter(torch.rand(20, dim // 2)), nn.Parameter(torch.rand(20, dim // 2))
        self.query = nn.Parameter(torch.rand(queries, dim))
        self.transformer = nn.Transformer(dim, 2, 1, 2, 16)
        self.cls, self.box = nn.Linear(dim, classes + 1), nn.Linear(dim, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor | list[dict[str, Tensor]]]:
        h = self.backbone(x)
        height, width = h.shape[-2:]
        pos = torch.cat(
            [
                self.column[:width].unsqueeze(0).repeat(height, 1, 1),
                self.row[:height].unsqueeze(1).repeat(1, width, 1),
            ],
            dim=-1,
        )
        memory = self.transformer.encoder(pos.flatten(0, 1).unsqueeze(1) + 0.1 * h.flatten(2).permute(2, 0, 1))
        y, every = self.query.unsqueeze(1).expand(-1, x.size(0), -1), []
        for layer in self.transformer.decoder.layers:
            y = layer(y, memory)
            every.append(y.transpose(0, 1))
        out = [{"logits": self.cls(e), "boxes": self.box(e).sigmoid()} for e in every]
        return {**out[-1], "auxiliary": out[:-1]}


class GreedyCTC(nn.Module):
    """A speech head with greedy decoding: repeats and blanks go, the rest moves to the front. (N, L, 8), lengths."""

    def __init__(self, dim: int = 8, tokens: int = 6) -> None:
        super().__init__()
        self.rnn, self.fc = nn.GRU(dim, dim, batch_first=True, bidirectional=True), nn.Linear(2 * dim, tokens)

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        log_probs = self.fc(self.rnn(x)[0]).log_softmax(-1)
        best = log_probs.argmax(-1)
        valid = torch.arange(best.size(1)).unsqueeze(0) < lengths.unsqueeze(1)
        fresh = torch.ones_like(valid)
        fresh[:, 1:] = best[:, 1:] != best[:, :-1]
        keep = valid & fresh & (best != 0)
        order = torch.argsort((~keep).int(), dim=1, stable=True)
        tokens = torch.where(keep, best, 0).gather(1, order)
        return log_probs, tokens, keep.sum(1)


class ForwardBackward(nn.Module):
    """The forward recursion of CTC (Graves et al. 2006) written out: likelihoods of given targets. (N, L, 8), targets (N, 3)."""

    def __init__(self, dim: int = 8, tokens: int = 6) -> None:
        super().__init__()
        self.fc = nn.Linear(dim, tokens)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        lp = self.fc(x).log_softmax(-1)
        n, steps, _ = lp.shape
        labels = torch.zeros(n, 2 * targets.size(1) + 1, dtype=torch.long)
        labels[:, 1::2] = targets
        jump = torch.zeros_like(labels, dtype=torch.bool)
        jump[:, 2:] = (labels[:, 2:] != 0) & (labels[:, 2:] != labels[:, :-2])
        neg = torch.finfo(lp.dtype).min / 4
        alpha = torch.full((n, labels.size(1)), neg, dtype=lp.dtype)
        alpha[:, :2] = lp[:, 0].gather(1, labels[:, :2])
        for t in range(1, steps):
            one = F.pad(alpha, (1, 0), value=neg)[:, :-1]
            two = F.pad(alpha, (2, 0), value=neg)[:, :-2].masked_fill(~jump, neg)
            alpha = torch.logsumexp(torch.stack([alpha, one, two]), 0) + lp[:, t].gather(1, labels)
        return torch.logsumexp(alpha[:, -2:], dim=1)
