"""Sets, slots, trees and memories: networks over things without an order, or with one of their own."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class SlotAttention(nn.Module):
    """Locatello et al. 2020: slots compete for pixels, a GRU updates them, a spatial broadcast decoder. (N, 3, 8, 8)."""

    def __init__(self, slots: int = 3, dim: int = 8, rounds: int = 3) -> None:
        super().__init__()
        self.slots, self.rounds, self.dim = slots, rounds, dim
        self.encode, self.place = nn.Conv2d(3, dim, 5, padding=2), nn.Linear(4, dim)
        self.mu, self.log_sigma = nn.Parameter(torch.randn(1, 1, dim)), nn.Parameter(torch.zeros(1, 1, dim))
        self.register_buffer("noise", torch.randn(1, slots, dim))
        self.q, self.k, self.v = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.norm_in, self.norm_slots, self.norm_mlp = (nn.LayerNorm(dim) for _ in range(3))
        self.gru = nn.GRUCell(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 16), nn.ReLU(inplace=True), nn.Linear(16, dim))
        self.decode = nn.Sequential(nn.ConvTranspose2d(dim, 8, 5, padding=2), nn.ReLU(), nn.Conv2d(8, 4, 3, padding=1))

    def grid(self, h: int, w: int) -> Tensor:
        axes = [torch.linspace(0.0, 1.0, steps=s) for s in (h, w)]
        g = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1)
        return torch.cat([g, 1.0 - g], dim=-1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        n, _, h, w = x.shape
        grid = self.grid(h, w).to(x)
        f = self.norm_in((self.encode(x).permute(0, 2, 3, 1) + self.place(grid)).flatten(1, 2))
        slots = self.mu + self.log_sigma.exp() * self.noise.expand(n, -1, -1)
        k, v = self.k(f), self.v(f)
        for _ in range(self.rounds):
            before = slots
            q = self.q(self.norm_slots(slots)) * self.dim**-0.5
            attention = torch.einsum("nid,njd->nij", q, k).softmax(dim=1) + 1e-8
            updates = torch.einsum("njd,nij->nid", v, attention / attention.sum(-1, keepdim=True))
            slots = self.gru(updates.reshape(-1, self.dim), before.reshape(-1, self.dim)).reshape(n, -1, self.dim)
            slots = slots + self.mlp(self.norm_mlp(slots))
        wide = slots.reshape(-1, 1, 1, self.dim).repeat(1, h, w, 1) + self.place(grid)
        colours, alpha = self.decode(wide.permute(0, 3, 1, 2)).view(n, self.slots, 4, h, w).split([3, 1], dim=2)
        masks = F.softmax(alpha, dim=1)
        return (colours * masks).sum(1), masks, slots


class Perceiver(nn.Module):
    """Perceiver IO (Jaegle et al. 2022): latents read the input, think, and are read by output queries. (N, L, 5)."""

    def __init__(self, dim: int = 5, latents: int = 4, width: int = 12, outputs: int = 3, bands: int = 3) -> None:
        super().__init__()
        self.bands, inputs = bands, dim + 2 * bands + 1
        self.latents = nn.Parameter(torch.randn(latents, width))
        self.queries = nn.Parameter(torch.randn(outputs, width))
        self.read = nn.MultiheadAttention(width, 2, kdim=inputs, vdim=inputs, batch_first=True)
        self.think = nn.TransformerEncoderLayer(width, 2, 24, 0.0, F.gelu, batch_first=True, norm_first=True)
        self.write = nn.MultiheadAttention(width, 2, batch_first=True)
        self.head = nn.Linear(width, 2)

    def encode(self, length: int, like: Tensor) -> Tensor:
        p = torch.linspace(-1, 1, length, dtype=like.dtype, device=like.device)[:, None]
        scales = torch.logspace(0, math.log10(length / 2), self.bands, dtype=like.dtype)
        angle = p * scales * math.pi
        return torch.cat([angle.sin(), angle.cos(), p], -1)

    def forward(self, x: Tensor) -> Tensor:
        n, length, _ = x.shape
        x = torch.cat([x, self.encode(length, x).expand(n, -1, -1)], -1)
        z = self.latents.expand(n, -1, -1)
        z = z + self.read(z, x, x, need_weights=False)[0]
        for _ in range(2):  # the same weights twice
            z = self.think(z)
        return self.head(self.write(self.queries.expand(n, -1, -1), z, z)[0])


class SetTransformer(nn.Module):
    """Lee et al. 2019: induced self-attention, pooling by attention with seeds, written with heads along the batch. (N, S, 4)."""

    def __init__(self, dim: int = 4, width: int = 8, points: int = 3, seeds: int = 2, heads: int = 2) -> None:
        super().__init__()
        self.heads, self.width = heads, width
        self.points = nn.Parameter(torch.Tensor(1, points, width))
        self.seeds = nn.Parameter(torch.Tensor(1, seeds, width))
        nn.init.xavier_uniform_(self.points)
        nn.init.xavier_uniform_(self.seeds)
        sizes = [(width, dim), (dim, width), (width, width)]
        self.q = nn.ModuleList(nn.Linear(a, width) for a, _ in sizes)
        self.k = nn.ModuleList(nn.Linear(b, width) for _, b in sizes)
        self.v = nn.ModuleList(nn.Linear(b, width) for _, b in sizes)
        self.o = nn.ModuleList(nn.Linear(width, width) for _ in sizes)

    def attend(self, i: int, q: Tensor, k: Tensor) -> Tensor:
        q, k, v = self.q[i](q), self.k[i](k), self.v[i](k)
        size = self.width // self.heads
        q_, k_, v_ = (torch.cat(t.split(size, 2), 0) for t in (q, k, v))
        a = torch.softmax(q_.bmm(k_.transpose(1, 2)) / math.sqrt(self.width), 2)
        o = torch.cat((q_ + a.bmm(v_)).split(q.size(0), 0), 2)
        return o + F.relu(self.o[i](o))

    def forward(self, x: Tensor) -> Tensor:
        h = self.attend(0, self.points.repeat(x.size(0), 1, 1), x)
        x = self.attend(1, x, h)
        return self.attend(2, self.seeds.repeat(x.size(0), 1, 1), x)


class DeepSets(nn.Module):
    """Zaheer et al. 2017: equivariant layers by maxima, and sums over members that a mask keeps. (N, S, 3), mask (N, S)."""

    def __init__(self, dim: int = 3, width: int = 8) -> None:
        super().__init__()
        self.gamma, self.lam = nn.ModuleList(), nn.ModuleList()
        for a in (dim, width):
            self.gamma.append(nn.Linear(a, width))
            self.lam.append(nn.Linear(a, width, bias=False))
        self.rho = nn.Sequential(nn.Linear(2 * width, width), nn.ELU(), nn.Linear(width, 1))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        m = mask.unsqueeze(-1).to(x.dtype)
        for gamma, lam in zip(self.gamma, self.lam, strict=True):
            top, _ = torch.where(m > 0, x, torch.finfo(x.dtype).min).max(1, keepdim=True)
            x = F.elu(gamma(x) - lam(top)) * m
        mean = x.sum(1) / m.sum(1)
        spread = torch.sqrt(((x - mean[:, None]) ** 2 * m).sum(1) / m.sum(1) + 1e-6)
        return self.rho(torch.cat([mean, spread], -1)).squeeze(-1)


class RelationNetwork(nn.Module):
    """Santoro et al. 2017: every pair of cells of a feature map with the question. Images (N, 3, 12, 12), (N, 6)."""

    def __init__(self, channels: int = 4, question: int = 6, hidden: int = 12) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(3, channels, 3, 2, 1), nn.BatchNorm2d(channels), nn.ReLU(), nn.MaxPool2d(2))
        self.g = nn.Sequential(nn.Linear(2 * (channels + 2) + question, hidden), nn.ReLU(), nn.Linear(hidden, hidden))
        self.f = nn.Sequential(nn.Linear(hidden, hidden), nn.ReLU(), nn.Dropout(0.5), nn.Linear(hidden, 3))

    def forward(self, image: Tensor, question: Tensor) -> Tensor:
        x = self.conv(image)
        n, c, h, w = x.size()
        places = torch.stack([torch.arange(h).repeat_interleave(w), torch.arange(w).repeat(h)], -1).to(x) / h
        o = torch.cat([x.view(n, c, h * w).permute(0, 2, 1), places.unsqueeze(0).repeat(n, 1, 1)], 2)
        k = o.size(1)
        i = o.unsqueeze(1).expand(-1, k, -1, -1)
        j = torch.unsqueeze(o, 2).expand(-1, -1, k, -1)
        q = question[:, None, None].expand(-1, k, k, -1)
        pairs = torch.cat([i, j, q], 3).contiguous().view(n * k * k, -1)
        return F.log_softmax(self.f(self.g(pairs).view(n, k * k, -1).sum(1)), dim=1)


class EndToEndMemory(nn.Module):
    """Sukhbaatar et al. 2015: sentences by position encoding into memories, hops with adjacent weights. (N, S, W), (N, W)."""

    def __init__(self, words: int = 20, dim: int = 6, hops: int = 3, sentence: int = 4, most: int = 8) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(words, dim, padding_idx=0) for _ in range(hops + 1))
        self.time = nn.ParameterList(nn.Parameter(torch.randn(1, most, dim) / 5) for _ in range(hops + 1))
        code = torch.ones(sentence, dim)
        for i in range(1, sentence + 1):
            for j in range(1, dim + 1):
                code[i - 1, j - 1] = 1 + 4 * (i - (sentence + 1) / 2) * (j - (dim + 1) / 2) / sentence / dim
        self.register_buffer("code", code)

    def forward(self, story: Tensor, question: Tensor) -> Tensor:
        n, s, w = story.shape
        u = torch.sum(self.tables[0](question) * self.code, 1)
        for hop in range(len(self.tables) - 1):
            flat = story.view(n * s, w)
            m = (self.tables[hop](flat) * self.code).sum(1).view(n, s, -1) + self.time[hop][:, :s]
            c = (self.tables[hop + 1](flat) * self.code).sum(1).view(n, s, -1) + self.time[hop + 1][:, :s]
            p = torch.softmax(torch.bmm(m, u.unsqueeze(2)).squeeze(2), dim=-1)
            u = u + torch.bmm(c.permute(0, 2, 1), p[..., None])[..., 0]
        return u @ self.tables[-1].weight.t()


class TreeLSTM(nn.Module):
    """Tai et al. 2015, the child-sum form, level by level: given are each node's level and its parent. (V, 5), (V,), (V,)."""

    def __init__(self, dim: int = 5, hidden: int = 6, depth: int = 3) -> None:
        super().__init__()
        self.hidden, self.depth = hidden, depth
        self.iou, self.u_iou = nn.Linear(dim, 3 * hidden), nn.Linear(hidden, 3 * hidden, bias=False)
        self.f, self.u_f = nn.Linear(dim, hidden), nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: Tensor, level: Tensor, parent: Tensor) -> tuple[Tensor, Tensor]:
        v = x.size(0)
        h, c = torch.zeros(v, self.hidden, dtype=x.dtype), torch.zeros(v, self.hidden, dtype=x.dtype)
        iou, f = self.iou(x), self.f(x)
        for depth in range(self.depth):
            here = (level == depth).unsqueeze(1)
            below = (level < depth).unsqueeze(1)
            children = torch.zeros_like(h).index_add_(0, parent, torch.where(below, h, 0))
            forget = torch.sigmoid(f[parent] + self.u_f(h)) * c
            kept = torch.zeros_like(c).index_add_(0, parent, forget * below)
            i, o, u = torch.chunk(iou + self.u_iou(children), 3, 1)
            cell = i.sigmoid() * u.tanh() + kept
            c = torch.where(here, cell, c)
            h = torch.where(here, torch.sigmoid(o) * torch.tanh(cell), h)
        return h, h[level.argmax()]


class DiffPool(nn.Module):
    """Ying et al. 2018: dense graphs pooled by soft assignments, with their two losses. (N, V, 4), adjacency (N, V, V), mask."""

    def __init__(self, dim: int = 4, hidden: int = 8, clusters: tuple[int, int] = (4, 2)) -> None:
        super().__init__()
        sizes = [dim, hidden, hidden]
        self.embed = nn.ModuleList(nn.Linear(a, hidden) for a in sizes)
        self.assign = nn.ModuleList(nn.Linear(a, k) for a, k in zip(sizes, clusters, strict=False))
        self.norm = nn.BatchNorm1d(hidden)
        self.head = nn.Linear(hidden, 3)

    def normalised(self, a: Tensor) -> Tensor:
        a = a.clone()
        idx = torch.arange(a.size(-1))
        a[:, idx, idx] = 1
        return a / a.sum(-1, keepdim=True).clamp(min=1)

    def forward(self, x: Tensor, weights: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a = torch.sigmoid(weights + weights.mT)
        m = mask[..., None].to(x.dtype)
        link = entropy = x.new_zeros(())
        for embed, assign in zip(self.embed, self.assign, strict=False):
            h = a if m is None else a * m * m.mT
            near = self.normalised(h) @ x
            z = F.relu(self.norm(embed(near).transpose(1, 2)).transpose(1, 2))
            s = assign(near).softmax(-1)
            if m is not None:
                z, s = z * m, s * m
            link = link + torch.norm(h - s @ s.transpose(1, 2), p=2) / h.numel()
            entropy = entropy + (-s * torch.log(s + 1e-15)).sum(dim=-1).mean()
            x, a, m = s.transpose(1, 2) @ z, s.transpose(1, 2) @ h @ s, None
        z = self.embed[-1](self.normalised(a) @ x)
        return self.head(z.mean(dim=1)), link, entropy


class Nystromformer(nn.Module):
    """Xiong et al. 2021: attention by landmarks and an iterated pseudo-inverse, with a convolution of values. (N, 8, C)."""

    def __init__(self, dim: int = 8, heads: int = 2, landmarks: int = 4, kernel: int = 3) -> None:
        super().__init__()
        self.heads, self.landmarks, self.size = heads, landmarks, dim // heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.conv = nn.Conv2d(heads, heads, (kernel, 1), padding=(kernel // 2, 0), bias=False, groups=heads)

    @staticmethod
    def inverse(matrix: Tensor, steps: int = 6) -> Tensor:
        eye = torch.eye(matrix.size(-1), device=matrix.device, dtype=matrix.dtype)
        v = 1 / torch.max(torch.sum(matrix, dim=-2)) * matrix.transpose(-1, -2)
        for _ in range(steps):
            kv = torch.matmul(matrix, v)
            v = torch.matmul(0.25 * v, 13 * eye - torch.matmul(kv, 15 * eye - torch.matmul(kv, 7 * eye - kv)))
        return v

    def forward(self, x: Tensor) -> Tensor:
        n, t, c = x.shape
        q, k, v = self.qkv(x).view(n, t, 3, self.heads, self.size).permute(2, 0, 3, 1, 4).unbind(0)
        q, k = q / math.sqrt(math.sqrt(self.size)), k / math.sqrt(math.sqrt(self.size))
        ql, kl = (p.reshape(n, self.heads, self.landmarks, t // self.landmarks, self.size).mean(dim=-2) for p in (q, k))
        k1, k2, k3 = (F.softmax(a @ b.transpose(-1, -2), dim=-1) for a, b in ((q, kl), (ql, kl), (ql, k)))
        y = k1 @ self.inverse(k2) @ (k3 @ v) + self.conv(v)
        return y.transpose(1, 2).reshape(n, t, c)


class Performer(nn.Module):
    """Choromanski et al. 2021: positive orthogonal random features, causal by prefix sums. (N, L, C)."""

    def __init__(self, dim: int = 8, heads: int = 2, features: int = 6) -> None:
        super().__init__()
        self.heads, self.qkv = heads, nn.Linear(dim, 3 * dim)
        size = dim // heads
        blocks = [torch.linalg.qr(torch.randn(size, size))[0].T for _ in range(math.ceil(features / size))]
        lengths = torch.randn(features, size).norm(dim=1)
        self.register_buffer("projection", torch.diag(lengths) @ torch.cat(blocks)[:features])

    def feature(self, x: Tensor, query: bool) -> Tensor:
        x = x * x.size(-1) ** -0.25
        p = torch.einsum("...id,jd->...ij", x, self.projection.type_as(x))
        half = x.square().sum(-1, keepdim=True) / 2
        top = torch.amax(p, dim=-1 if query else (-1, -2), keepdim=True).detach()
        return self.projection.size(0) ** -0.5 * (torch.exp(p - half - top) + 1e-4)

    def forward(self, x: Tensor) -> Tensor:
        n, t = x.shape[:2]
        q, k, v = (p.reshape(n, t, self.heads, -1).permute(0, 2, 1, 3) for p in self.qkv(x).chunk(3, dim=-1))
        q, k = self.feature(q, True), self.feature(k, False)
        over = 1.0 / torch.einsum("...nd,...nd->...n", q, k.cumsum(dim=-2).type_as(q))
        context = torch.einsum("...nd,...ne->...nde", k, v).cumsum(dim=-3)
        return torch.einsum("...nde,...nd,...n->...ne", context, q, over).permute(0, 2, 1, 3).flatten(2)
