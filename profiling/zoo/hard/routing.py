"""Which weights or tokens take part depends on the input: experts, early exits, tokens kept, weights made by networks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Expert(nn.Sequential):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))


class TopKExperts(nn.Module):
    """Mixtral's layer: every expert runs on the tokens that picked it, found with `torch.where` and added back. (N, T, C)."""

    def __init__(self, dim: int = 16, experts: int = 4, k: int = 2) -> None:
        super().__init__()
        self.k = k
        self.gate = nn.Linear(dim, experts, bias=False)
        self.experts = nn.ModuleList(Expert(dim, 2 * dim) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        n, t, c = x.shape
        flat = x.view(-1, c)
        weight, chosen = torch.topk(F.softmax(self.gate(flat), dim=1), self.k, dim=-1)
        weight = weight / weight.sum(dim=-1, keepdim=True)
        out = torch.zeros_like(flat)
        mask = F.one_hot(chosen, num_classes=len(self.experts)).permute(2, 1, 0)
        for i, expert in enumerate(self.experts):
            slot, token = torch.where(mask[i])
            out.index_add_(0, token, expert(flat[token]) * weight[token, slot, None])
        return out.reshape(n, t, c)


class SwitchFFN(nn.Module):
    """Switch transformer (Fedus et al. 2021): one expert a token, a capacity by cumsum, dispatch with einsum."""

    def __init__(self, dim: int = 16, experts: int = 4, factor: float = 1.0) -> None:
        super().__init__()
        self.experts, self.factor = experts, factor
        self.router = nn.Linear(dim, experts)
        self.w1 = nn.Parameter(torch.randn(experts, dim, 2 * dim) / 4)
        self.w2 = nn.Parameter(torch.randn(experts, 2 * dim, dim) / 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        shape = x.shape
        x = x.reshape(-1, shape[-1])
        probability = F.softmax(self.router(x), -1)
        value, index = probability.max(-1)
        capacity = int(self.factor * x.size(0) / self.experts)
        one = F.one_hot(index, self.experts).to(x.dtype)
        place = torch.cumsum(one, 0) * one
        one = one * (place <= capacity)
        slot = F.one_hot(((place * one).sum(-1) - 1).clamp(min=0).long(), capacity).to(x.dtype)
        dispatch = one.unsqueeze(-1) * slot.unsqueeze(1)
        h = F.relu(torch.einsum("tec,td,edh->ech", dispatch, x, self.w1))
        out = torch.einsum("tec,t,ech,ehd->td", dispatch, value, h, self.w2)
        balance = self.experts * (one.mean(0) * probability.mean(0)).sum()
        return (x + out).view(shape), balance


class ExpertChoice(nn.Module):
    """Zhou et al. 2022: every expert takes its best tokens; results return by scatter_add."""

    def __init__(self, dim: int = 16, experts: int = 4, tokens: int = 3) -> None:
        super().__init__()
        self.tokens = tokens
        self.router = nn.Linear(dim, experts, bias=False)
        self.weight = nn.Parameter(torch.randn(experts, dim, dim) / 4)

    def forward(self, x: Tensor) -> Tensor:
        _, t, c = x.shape
        score = self.router(x).softmax(-1).transpose(1, 2)
        value, index = score.topk(min(self.tokens, t), dim=-1)
        at = index.unsqueeze(-1).expand(-1, -1, -1, c)
        taken = x.unsqueeze(1).expand(-1, score.size(1), -1, -1).gather(2, at)
        made = torch.einsum("netd,edf->netf", taken, self.weight) * value.unsqueeze(-1)
        return torch.zeros_like(x).scatter_add_(1, at.flatten(1, 2), made.flatten(1, 2))


class SortedExperts(nn.Module):
    """Tokens sorted by expert, one matrix product a group with sizes from bincount, and the order undone."""

    def __init__(self, dim: int = 12, experts: int = 3) -> None:
        super().__init__()
        self.router = nn.Linear(dim, experts)
        self.weight = nn.Parameter(torch.randn(experts, dim, dim) / 3)

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.router(x).argmax(-1)
        order = torch.argsort(chosen, stable=True)
        counts = torch.bincount(chosen, minlength=self.weight.size(0)).tolist()
        parts = [p @ w for p, w in zip(x[order].split(counts), self.weight, strict=True)]
        out = torch.empty_like(x)
        out[order] = torch.cat(parts)
        return x + out


class SoftExperts(nn.Module):
    """Puigcerver et al. 2023: slots as soft mixtures of tokens; experts run on slots."""

    def __init__(self, dim: int = 16, experts: int = 3, slots: int = 2) -> None:
        super().__init__()
        self.phi = nn.Parameter(torch.randn(dim, experts, slots) / 4)
        self.scale = nn.Parameter(torch.ones(1))
        self.experts = nn.ModuleList(Expert(dim, dim) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        logits = torch.einsum("ntd,des->ntes", F.normalize(x, dim=-1), self.scale * F.normalize(self.phi, dim=0))
        dispatch = logits.softmax(1)
        combine = logits.flatten(2).softmax(-1).view_as(logits)
        slots = torch.einsum("ntd,ntes->nesd", x, dispatch)
        made = torch.stack([f(slots[:, i]) for i, f in enumerate(self.experts)], 1)
        return torch.einsum("nesd,ntes->ntd", made, combine)


class CondConv(nn.Module):
    """Yang et al. 2019: kernels mixed by sample, one grouped convolution over the batch."""

    def __init__(self, channels: int = 6, out: int = 8, experts: int = 3) -> None:
        super().__init__()
        self.route = nn.Linear(channels, experts)
        self.weight = nn.Parameter(torch.randn(experts, out, channels, 3, 3) / 7)
        self.bias = nn.Parameter(torch.randn(experts, out))

    def forward(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        r = torch.sigmoid(self.route(F.adaptive_avg_pool2d(x, 1).flatten(1)))
        weight = torch.einsum("ne,eoihw->noihw", r, self.weight).reshape(-1, c, 3, 3)
        out = F.conv2d(x.reshape(1, n * c, h, w), weight, (r @ self.bias).flatten(), padding=1, groups=n)
        return out.view(n, -1, h, w)


class DynamicConv(nn.Module):
    """Lightweight dynamic convolution over time (Wu et al. 2019): softmax kernels predicted by position, Tensor.unfold."""

    def __init__(self, dim: int = 16, heads: int = 4, kernel: int = 3) -> None:
        super().__init__()
        self.heads, self.kernel = heads, kernel
        self.weight, self.out = nn.Linear(dim, heads * kernel), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        n, t, c = x.shape
        weight = self.weight(x).view(n, t, self.heads, 1, self.kernel).softmax(-1)
        window = F.pad(x, (0, 0, self.kernel - 1, 0)).unfold(1, self.kernel, 1)
        mixed = (window.reshape(n, t, self.heads, c // self.heads, self.kernel) * weight).sum(-1)
        return self.out(mixed.reshape(n, t, c))


class HyperNetwork(nn.Module):
    """Ha et al. 2017: a network makes the weights of a target network from a code, sample by sample."""

    def __init__(self, code: int = 6, inputs: int = 5, hidden: int = 7, out: int = 3) -> None:
        super().__init__()
        self.sizes = [(inputs, hidden), (hidden, out)]
        total = sum(a * b + b for a, b in self.sizes)
        self.make = nn.Sequential(nn.Linear(code, 16), nn.Tanh(), nn.Linear(16, total))

    def forward(self, x: Tensor, code: Tensor) -> Tensor:
        flat, at = self.make(code), 0
        for i, (a, b) in enumerate(self.sizes):
            w = flat[:, at : at + a * b].view(-1, a, b)
            bias = flat[:, at + a * b : at + a * b + b].unsqueeze(1)
            x = torch.baddbmm(bias, x, w)
            x = torch.relu(x) if i == 0 else x
            at += a * b + b
        return x


class ProductKeyMemory(nn.Module):
    """Lample et al. 2019: top keys of two halves, their sums' top, values by a weighted embedding_bag."""

    def __init__(self, dim: int = 16, keys: int = 8, k: int = 3) -> None:
        super().__init__()
        self.keys_count, self.k = keys, k
        self.keys = nn.Parameter(torch.randn(2, keys, dim // 2))
        self.values = nn.EmbeddingBag(keys * keys, dim, mode="sum")

    def forward(self, x: Tensor) -> Tensor:
        left, right = x.chunk(2, -1)
        s1, i1 = (left @ self.keys[0].t()).topk(self.k, -1)
        s2, i2 = (right @ self.keys[1].t()).topk(self.k, -1)
        every = (s1.unsqueeze(-1) + s2.unsqueeze(-2)).flatten(-2)
        index = (i1.unsqueeze(-1) * self.keys_count + i2.unsqueeze(-2)).flatten(-2)
        score, best = every.topk(self.k, -1)
        index = index.gather(-1, best)
        bag = self.values(index.view(-1, self.k), per_sample_weights=score.softmax(-1).view(-1, self.k))
        return x + bag.view_as(x)


class MaskedAutoencoder(nn.Module):
    """MAE (He et al. 2021) with the noise given: tokens by argsort and gather, encoded, restored among mask tokens."""

    def __init__(self, dim: int = 16, keep: float = 0.5) -> None:
        super().__init__()
        self.keep = keep
        self.token = nn.Parameter(torch.randn(1, 1, dim) / 3)
        self.encoder = nn.TransformerEncoderLayer(dim, 2, 32, batch_first=True, norm_first=True)
        self.decode = nn.Linear(dim, 12)

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        n, t, c = x.shape
        kept = int(t * self.keep)
        shuffle = torch.argsort(noise, dim=1)
        restore = torch.argsort(shuffle, dim=1)
        x = torch.gather(x, 1, shuffle[:, :kept].unsqueeze(-1).repeat(1, 1, c))
        mask = torch.ones(n, t, dtype=x.dtype)
        mask[:, :kept] = 0
        mask = torch.gather(mask, 1, restore)
        x = self.encoder(x)
        x = torch.cat([x, self.token.repeat(n, t - kept, 1)], 1)
        x = torch.gather(x, 1, restore.unsqueeze(-1).repeat(1, 1, c))
        return self.decode(x), mask


class TokenMerging(nn.Module):
    """ToMe (Bolya et al. 2022): the most alike pairs of odd and even tokens are averaged by scatter_reduce."""

    def __init__(self, dim: int = 16, r: int = 2) -> None:
        super().__init__()
        self.r, self.metric, self.out = r, nn.Linear(dim, 8), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        c = x.size(-1)
        m = self.metric(x)
        m = m / m.norm(dim=-1, keepdim=True)
        a, b = m[..., ::2, :], m[..., 1::2, :]
        best, to = (a @ b.transpose(-1, -2)).max(dim=-1)
        order = best.argsort(dim=-1, descending=True)[..., None]
        left, merged = order[..., self.r :, :], order[..., : self.r, :]
        target = to[..., None].gather(dim=-2, index=merged)
        even, odd = x[..., ::2, :], x[..., 1::2, :]
        stays = even.gather(dim=-2, index=left.expand(-1, -1, c))
        moved = even.gather(dim=-2, index=merged.expand(-1, -1, c))
        odd = odd.scatter_reduce(-2, target.expand(-1, -1, c), moved, reduce="mean")
        return self.out(torch.cat([stays, odd], dim=1))


class EarlyExit(nn.Module):
    """BranchyNet (Teerapittayanon et al. 2016): leaves at the first head that is sure of the whole batch."""

    def __init__(self, dim: int = 8, blocks: int = 3, sure: float = 0.9) -> None:
        super().__init__()
        self.sure = sure
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(dim, dim), nn.ReLU()) for _ in range(blocks))
        self.heads = nn.ModuleList(nn.Linear(dim, 4) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block, head in zip(self.blocks, self.heads, strict=True):
            x = block(x)
            y = head(x).softmax(-1)
            if y.max(-1).values.min() > self.sure:
                return y
        return y


class AdaptiveTime(nn.Module):
    """Graves 2016: steps of a cell until every halting sum is over a threshold; a while loop on a tensor."""

    def __init__(self, dim: int = 8, limit: int = 5) -> None:
        super().__init__()
        self.limit = limit
        self.cell, self.halt = nn.GRUCell(dim, dim), nn.Linear(dim, 1)

    def forward(self, x: Tensor) -> Tensor:
        h, total, out, step = torch.zeros_like(x), torch.zeros_like(x[:, :1]), torch.zeros_like(x), 0
        while bool((total < 0.99).any()) and step < self.limit:
            h = self.cell(x, h)
            p = torch.sigmoid(self.halt(h))
            p = torch.where(total + p > 0.99, 1 - total, p) * (total < 0.99)
            out, total, step = out + p * h, total + p, step + 1
        return out


class PixelsIntoText(nn.Module):
    """LLaVA's merge: features of an image replace the embeddings of its placeholder tokens by masked_scatter."""

    def __init__(self, vocabulary: int = 50, dim: int = 12, image_token: int = 7) -> None:
        super().__init__()
        self.image_token = image_token
        self.embed, self.project = nn.Embedding(vocabulary, dim), nn.Linear(6, dim)
        self.layer = nn.TransformerEncoderLayer(dim, 2, 24, batch_first=True)

    def forward(self, ids: Tensor, pixels: Tensor) -> Tensor:
        ids = ids.clone()
        ids[:, 1 : 1 + pixels.size(1)] = self.image_token
        x = self.embed(ids)
        mask = (ids == self.image_token).unsqueeze(-1).expand_as(x)
        if mask.sum() < pixels[..., 0].numel() * x.size(-1):
            raise ValueError("fewer image tokens than image features")
        features = self.project(pixels)
        place = torch.arange(ids.size(1)).expand_as(ids)
        mask = mask & ((place >= 1) & (place <= pixels.size(1))).unsqueeze(-1)
        return self.layer(x.masked_scatter(mask, features))


class GumbelSelect(nn.Module):
    """A straight-through hard choice in evaluation: one-hot by scatter_, as in discrete bottlenecks."""

    def __init__(self, dim: int = 8, codes: int = 6) -> None:
        super().__init__()
        self.logits, self.codes = nn.Linear(dim, codes), nn.Parameter(torch.randn(codes, dim))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        soft = self.logits(x).softmax(-1)
        index = soft.max(-1, keepdim=True)[1]
        hard = torch.zeros_like(soft).scatter_(-1, index, 1.0)
        hard = hard - soft.detach() + soft
        return hard @ self.codes, index.squeeze(-1)


class SkipLayer(nn.Module):
    """Layers that a buffer switches off (stochastic depth's final schedule), asked with `.item()` and `if` on buffers."""

    def __init__(self, dim: int = 8, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(dim, dim) for _ in range(layers))
        self.register_buffer("active", torch.tensor([True, False, True, True]))
        self.register_buffer("scale", torch.tensor(0.5))
        self.register_buffer("steps", torch.tensor(3))

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            if self.active[i]:
                x = x + layer(x).tanh() * self.scale.item()
        return x.repeat_interleave(int(self.steps), dim=-1) if self.steps > 2 else x


class Conditional(nn.Module):
    """torch.cond on the mean of the input: one of two small networks runs."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.high, self.low = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.mean() > 0, lambda v: self.high(v).relu(), lambda v: self.low(v).tanh(), (x,))


class CheckedInput(nn.Module):
    """A classifier that asserts what it is given: finite values, ids in range, masks that keep something."""

    def __init__(self, vocabulary: int = 40, dim: int = 12) -> None:
        super().__init__()
        self.vocabulary, self.embed, self.out = vocabulary, nn.Embedding(vocabulary, dim), nn.Linear(dim, 3)

    def forward(self, ids: Tensor, scale: Tensor) -> Tensor:
        assert ids.min() >= 0 and ids.max() < self.vocabulary, "ids out of range"
        assert torch.isfinite(scale).all()
        torch._assert(ids.dim() == 2, "ids are (N, T)")
        if not torch.any(ids != 0):
            return torch.zeros(ids.size(0), 3)
        mask = ids != 0
        x = self.embed(ids).masked_fill(~mask.unsqueeze(-1), 0).sum(1) / mask.sum(1, keepdim=True).clamp(min=1)
        return self.out(x * scale.abs().unsqueeze(-1))
