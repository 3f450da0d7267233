"""Decoders and recurrences: caches that are read and written, greedy loops, linear attention, state spaces, tags."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def split(x: Tensor, heads: int) -> Tensor:
    n, t, c = x.shape
    return x.view(n, t, heads, c // heads).transpose(1, 2)


class StaticCache(nn.Module):
    """A decoder layer with keys and values in buffers, written at `position` (gpt-fast). x: (1, T, C), position: (T,)."""

    def __init__(self, dim: int = 16, heads: int = 2, length: int = 12) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.register_buffer("k", torch.zeros(1, heads, length, dim // heads))
        self.register_buffer("v", torch.zeros(1, heads, length, dim // heads))
        self.register_buffer("causal", torch.tril(torch.ones(length, length, dtype=torch.bool)))

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        q, k, v = (split(p, self.heads) for p in self.qkv(x).chunk(3, -1))
        self.k[:, :, position] = k
        self.v[:, :, position] = v
        mask = self.causal[None, None, position]
        y = F.scaled_dot_product_attention(q, self.k, self.v, attn_mask=mask)
        return self.out(y.transpose(1, 2).flatten(2))


class DynamicCache(nn.Module):
    """Two layers that take past keys and values as tuples and give the longer ones back. ids: (N, T)."""

    def __init__(self, vocabulary: int = 40, dim: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.embed, self.place = nn.Embedding(vocabulary, dim), nn.Embedding(32, dim)
        self.qkv = nn.ModuleList(nn.Linear(dim, 3 * dim) for _ in range(2))
        self.head = nn.Linear(dim, vocabulary, bias=False)

    def forward(self, ids: Tensor, past: tuple[tuple[Tensor, Tensor], ...]) -> tuple:
        start = past[0][0].size(2)
        x = self.embed(ids) + self.place(torch.arange(start, start + ids.size(1)))
        present = []
        for layer, (pk, pv) in zip(self.qkv, past, strict=True):
            q, k, v = (split(p, self.heads) for p in layer(x).chunk(3, -1))
            k, v = torch.cat([pk, k], 2), torch.cat([pv, v], 2)
            mask = torch.ones(q.size(2), k.size(2), dtype=torch.bool).tril(start)
            x = x + F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)
            present.append((k, v))
        return self.head(x), tuple(present)


class RingCache(nn.Module):
    """Sliding-window decoding: keys and values are written at `position % window` of caches that come and go as arguments."""

    def __init__(self, dim: int = 16, window: int = 6) -> None:
        super().__init__()
        self.window = window
        self.q, self.k, self.v = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor, keys: Tensor, values: Tensor, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        slot = position % self.window
        rows = torch.arange(x.size(0))
        keys, values = keys.clone(), values.clone()
        keys[rows, slot] = self.k(x)
        values[rows, slot] = self.v(x)
        live = torch.arange(self.window).unsqueeze(0) <= position.unsqueeze(1)
        score = torch.einsum("nc,nwc->nw", self.q(x), keys) / math.sqrt(x.size(-1))
        weight = score.masked_fill(~live, float("-inf")).softmax(-1)
        return torch.einsum("nw,nwc->nc", weight, values), keys, values


class GreedyDecoder(nn.Module):
    """A GRU that writes a fixed number of tokens, feeding its argmax back, and keeps them in a preallocated tensor."""

    def __init__(self, vocabulary: int = 20, dim: int = 12, steps: int = 5) -> None:
        super().__init__()
        self.steps, self.embed = steps, nn.Embedding(vocabulary, dim)
        self.cell, self.head = nn.GRUCell(dim, dim), nn.Linear(dim, vocabulary)

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        n = state.size(0)
        token = torch.zeros(n, dtype=torch.long)
        tokens = torch.zeros(n, self.steps, dtype=torch.long)
        logits = torch.empty(n, self.steps, self.head.out_features, dtype=state.dtype)
        for i in range(self.steps):
            state = self.cell(self.embed(token), state)
            logits[:, i] = self.head(state)
            token = logits[:, i].argmax(-1)
            tokens[:, i] = token
        return tokens, logits


class StopAtEnd(nn.Module):
    """Greedy decoding that stops when every row has given the end token."""

    def __init__(self, vocabulary: int = 6, dim: int = 8, limit: int = 8) -> None:
        super().__init__()
        self.limit, self.embed = limit, nn.Embedding(vocabulary, dim)
        self.cell, self.head = nn.LSTMCell(dim, dim), nn.Linear(dim, vocabulary)

    def forward(self, h: Tensor, c: Tensor) -> Tensor:
        token, done, out = torch.ones(h.size(0), dtype=torch.long), torch.zeros(h.size(0), dtype=torch.bool), []
        for _ in range(self.limit):
            h, c = self.cell(self.embed(token), (h, c))
            logits = self.head(h)
            token = torch.where(done, 0, logits.argmax(-1))
            done |= token == 0
            out.append(logits)
            if done.all():
                break
        return torch.stack(out, 1).mean(1)


class Viterbi(nn.Module):
    """A CRF tagger: emissions from a BiLSTM, the best path by maxima forwards and back pointers backwards."""

    def __init__(self, dim: int = 8, tags: int = 5) -> None:
        super().__init__()
        self.lstm, self.emit = nn.LSTM(dim, 6, batch_first=True, bidirectional=True), nn.Linear(12, tags)
        self.transition = nn.Parameter(torch.randn(tags, tags))
        self.start, self.end = nn.Parameter(torch.randn(tags)), nn.Parameter(torch.randn(tags))

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        emission = self.emit(self.lstm(x)[0])
        live = mask.bool()
        score, back = self.start + emission[:, 0], []
        for t in range(1, x.size(1)):
            best, index = (score.unsqueeze(2) + self.transition).max(1)
            score = torch.where(live[:, t].unsqueeze(1), best + emission[:, t], score)
            back.append(torch.where(live[:, t].unsqueeze(1), index, torch.arange(score.size(1))))
        value, tag = (score + self.end).max(1)
        path = [tag]
        for index in reversed(back):
            path.append(index.gather(1, path[-1].unsqueeze(1)).squeeze(1))
        return torch.stack(path[::-1], 1), value


class CrfLikelihood(nn.Module):
    """The log-likelihood of given tags in a linear-chain CRF: gathers by tag, logsumexp over paths."""

    def __init__(self, dim: int = 8, tags: int = 5) -> None:
        super().__init__()
        self.emit, self.transition = nn.Linear(dim, tags), nn.Parameter(torch.randn(tags, tags))

    def forward(self, x: Tensor, tags: Tensor) -> Tensor:
        emission = self.emit(x)
        score = emission.gather(2, tags.unsqueeze(2)).squeeze(2).sum(1)
        score = score + self.transition[tags[:, :-1], tags[:, 1:]].sum(1)
        alpha = emission[:, 0]
        for t in range(1, x.size(1)):
            alpha = torch.logsumexp(alpha.unsqueeze(2) + self.transition + emission[:, t].unsqueeze(1), dim=1)
        return score - alpha.logsumexp(1)


class CTCGreedy(nn.Module):
    """Recognition with greedy CTC: repeats and blanks dropped, what remains packed to the left with a sort of the mask."""

    def __init__(self, dim: int = 8, classes: int = 6) -> None:
        super().__init__()
        self.gru, self.out = nn.GRU(dim, 10, batch_first=True), nn.Linear(10, classes)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        best = self.out(self.gru(x)[0]).log_softmax(-1).argmax(-1)
        keep = (best != 0) & (best != F.pad(best, (1, 0), value=-1)[:, :-1])
        order = (~keep).int().argsort(dim=1, stable=True)
        length = keep.sum(1)
        packed = best.gather(1, order)
        packed[torch.arange(x.size(1)) >= length.unsqueeze(1)] = 0
        return packed, length


class RWKV(nn.Module):
    """Peng et al. 2023: time mixing with an exponentially decaying numerator and denominator, in the stable form."""

    def __init__(self, dim: int = 12) -> None:
        super().__init__()
        self.decay, self.first = nn.Parameter(torch.randn(dim)), nn.Parameter(torch.randn(dim))
        self.mix = nn.Parameter(torch.rand(3, dim))
        self.r, self.k, self.v, self.o = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.shift = nn.ZeroPad2d((0, 0, 1, -1))

    def forward(self, x: Tensor) -> Tensor:
        before = self.shift(x)
        r, k, v = (f(x * m + before * (1 - m)) for f, m in zip((self.r, self.k, self.v), self.mix, strict=True))
        w = -torch.exp(self.decay)
        a, b, top, out = torch.zeros_like(k[:, 0]), torch.zeros_like(k[:, 0]), torch.full_like(k[:, 0], -1e38), []
        for t in range(x.size(1)):
            kt, vt = k[:, t], v[:, t]
            q = torch.maximum(top, self.first + kt)
            e1, e2 = torch.exp(top - q), torch.exp(self.first + kt - q)
            out.append((e1 * a + e2 * vt) / (e1 * b + e2))
            q = torch.maximum(top + w, kt)
            e1, e2 = torch.exp(top + w - q), torch.exp(kt - q)
            a, b, top = e1 * a + e2 * vt, e1 * b + e2, q
        return self.o(torch.sigmoid(r) * torch.stack(out, 1))


class Mamba(nn.Module):
    """Gu and Dao 2023: gated block with a causal depthwise convolution and a selective scan in a loop."""

    def __init__(self, dim: int = 8, state: int = 4, kernel: int = 3) -> None:
        super().__init__()
        self.state, inner = state, 2 * dim
        self.inward, self.outward = nn.Linear(dim, 2 * inner, bias=False), nn.Linear(inner, dim, bias=False)
        self.conv = nn.Conv1d(inner, inner, kernel, groups=inner, padding=kernel - 1)
        self.select, self.step = nn.Linear(inner, 2 * state + 1, bias=False), nn.Linear(1, inner)
        self.log_a = nn.Parameter(torch.log(torch.arange(1, state + 1).float()).repeat(inner, 1))
        self.d = nn.Parameter(torch.ones(inner))

    def forward(self, x: Tensor) -> Tensor:
        n, length, _ = x.shape
        x, gate = self.inward(x).chunk(2, -1)
        x = F.silu(self.conv(x.transpose(1, 2))[:, :, :length].transpose(1, 2))
        delta, b, c = self.select(x).split([1, self.state, self.state], -1)
        delta = F.softplus(self.step(delta))
        decay = torch.exp(delta.unsqueeze(-1) * -torch.exp(self.log_a))
        given = (delta * x).unsqueeze(-1) * b.unsqueeze(2)
        h, out = torch.zeros(n, x.size(2), self.state, dtype=x.dtype), []
        for i in range(length):
            h = decay[:, i] * h + given[:, i]
            out.append(torch.einsum("ncs,ns->nc", h, c[:, i]))
        return self.outward((torch.stack(out, 1) + x * self.d) * F.silu(gate))


class ChunkedSSD(nn.Module):
    """Mamba-2's state-space duality: segment sums by cumsum and a triangular mask of -inf, chunk by chunk."""

    def __init__(self, dim: int = 8, heads: int = 2, chunk: int = 4) -> None:
        super().__init__()
        self.heads, self.chunk = heads, chunk
        self.x, self.b, self.c = nn.Linear(dim, dim), nn.Linear(dim, 4), nn.Linear(dim, 4)
        self.dt = nn.Linear(dim, heads)

    @staticmethod
    def segments(a: Tensor) -> Tensor:
        t = a.size(-1)
        total = torch.cumsum(a, -1)
        mask = torch.tril(torch.ones(t, t, dtype=torch.bool))
        return (total[..., :, None] - total[..., None, :]).masked_fill(~mask, -torch.inf)

    def forward(self, u: Tensor) -> Tensor:
        n, t, _ = u.shape
        k = t // self.chunk
        x = self.x(u).view(n, k, self.chunk, self.heads, -1)
        a = -F.softplus(self.dt(u)).view(n, k, self.chunk, self.heads).permute(0, 3, 1, 2)
        b, c = self.b(u).view(n, k, self.chunk, 4), self.c(u).view(n, k, self.chunk, 4)
        inside = torch.einsum("bcls,bczs,bhclz,bczhp->bclhp", c, b, torch.exp(self.segments(a)), x)
        total = torch.cumsum(a, -1)
        states = torch.einsum("bczs,bhcz,bczhp->bchps", b, torch.exp(total[..., -1:] - total), x)
        states = torch.cat([torch.zeros_like(states[:, :1]), states], 1)
        carry = torch.exp(self.segments(F.pad(total[..., -1], (1, 0))))
        states = torch.einsum("bhzc,bchps->bzhps", carry, states)[:, :-1]
        across = torch.einsum("bcls,bchps,bhcl->bclhp", c, states, torch.exp(total))
        return (inside + across).reshape(n, t, -1)


class LinearAttention(nn.Module):
    """Katharopoulos et al. 2020: causal, elu + 1 feature maps, cumulative sums of key-value products."""

    def __init__(self, dim: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads, self.qkv = heads, nn.Linear(dim, 3 * dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(p, self.heads) for p in self.qkv(x).chunk(3, -1))
        q, k = F.elu(q) + 1, F.elu(k) + 1
        kv = torch.einsum("nhtd,nhte->nhtde", k, v).cumsum(2)
        norm = 1 / (torch.einsum("nhtd,nhtd->nht", q, k.cumsum(2)) + 1e-6)
        return torch.einsum("nhtd,nhtde,nht->nhte", q, kv, norm).transpose(1, 2).flatten(2)


class Retention(nn.Module):
    """RetNet (Sun et al. 2023): decays by head as powers of distances, group norm, swish gate."""

    def __init__(self, dim: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.register_buffer("gamma", 1 - 2.0 ** (-5 - torch.arange(heads).float()))
        self.qkv, self.gate, self.norm = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim), nn.GroupNorm(heads, dim)

    def forward(self, x: Tensor) -> Tensor:
        n, t, c = x.shape
        q, k, v = (split(p, self.heads) for p in self.qkv(x).chunk(3, -1))
        i = torch.arange(t)
        distance = (i.unsqueeze(1) - i.unsqueeze(0)).to(x.dtype)
        decay = torch.where(distance >= 0, self.gamma.view(-1, 1, 1) ** distance.clamp(min=0), 0)
        y = ((q @ k.transpose(-1, -2)) * decay @ v).transpose(1, 2).reshape(n * t, c)
        return self.norm(y).view(n, t, c) * F.silu(self.gate(x))


class DeltaNet(nn.Module):
    """Schlag et al. 2021: fast weights written by the delta rule, step by step."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.qkv, self.beta = nn.Linear(dim, 3 * dim), nn.Linear(dim, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        q, k, beta = F.normalize(q, dim=-1), F.normalize(k, dim=-1), self.beta(x).sigmoid()
        weight = x.new_zeros(x.size(0), x.size(2), x.size(2))
        out = torch.zeros_like(v)
        for t in range(x.size(1)):
            old = torch.bmm(weight, k[:, t].unsqueeze(-1)).squeeze(-1)
            weight = weight + torch.einsum("ni,nj->nij", beta[:, t] * (v[:, t] - old), k[:, t])
            out[:, t] = torch.bmm(weight, q[:, t, :, None])[..., 0]
        return out


class NeuralTuring(nn.Module):
    """Graves et al. 2014: addressing by content, gate, circular shift and sharpening; erase and add."""

    def __init__(self, dim: int = 6, slots: int = 8, width: int = 5) -> None:
        super().__init__()
        self.slots, self.width = slots, width
        self.cell = nn.LSTMCell(dim + width, 10)
        self.head = nn.Linear(10, 3 * width + 6)
        self.register_buffer("memory", torch.randn(slots, width) / 3)

    def forward(self, x: Tensor) -> Tensor:
        n, w = x.size(0), self.width
        memory = self.memory.expand(n, -1, -1).clone()
        h = c = x.new_zeros(n, 10)
        weight, read, out = x.new_full((n, self.slots), 1 / self.slots), x.new_zeros(n, w), []
        for t in range(x.size(1)):
            h, c = self.cell(torch.cat([x[:, t], read], 1), (h, c))
            key, erase, add, beta, gate, shift, power = self.head(h).split([w, w, w, 1, 1, 3, 1], 1)
            match = F.cosine_similarity(key.unsqueeze(1), memory, dim=-1)
            content = F.softmax(F.softplus(beta) * match, -1)
            weight = torch.sigmoid(gate) * content + (1 - torch.sigmoid(gate)) * weight
            around = torch.cat([weight[:, -1:], weight, weight[:, :1]], 1).unfold(1, 3, 1)
            weight = (around * shift.softmax(-1).unsqueeze(1)).sum(-1) ** (1 + F.softplus(power))
            weight = weight / weight.sum(1, keepdim=True)
            memory = memory * (1 - weight.unsqueeze(-1) * erase.sigmoid().unsqueeze(1))
            memory = memory + weight.unsqueeze(-1) * add.unsqueeze(1)
            read = (weight.unsqueeze(-1) * memory).sum(1)
            out.append(read)
        return torch.stack(out, 1)


class Pointer(nn.Module):
    """Pointer network (Vinyals et al. 2015): visits every item once; the visited are masked by scatter."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.embed, self.cell = nn.Linear(2, dim), nn.LSTMCell(dim, dim)
        self.w1, self.w2, self.v = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, 1)

    def forward(self, cities: Tensor) -> tuple[Tensor, Tensor]:
        e = self.embed(cities)
        h = c = e.mean(1)
        mask = torch.zeros(e.shape[:2], dtype=torch.bool)
        token, tour, score = e[:, 0], [], torch.zeros(e.size(0), dtype=e.dtype)
        for _ in range(cities.size(1)):
            h, c = self.cell(token, (h, c))
            logits = self.v(torch.tanh(self.w1(e) + self.w2(h).unsqueeze(1))).squeeze(-1)
            value, index = logits.masked_fill(mask, -1e9).log_softmax(-1).max(-1)
            mask = mask.scatter(1, index.unsqueeze(1), True)
            token = e[torch.arange(e.size(0)), index]
            score += value
            tour.append(index)
        return torch.stack(tour, 1), score


class RelativeBuckets(nn.Module):
    """T5's attention: logarithmic buckets of distances, a bias by bucket; made for every length anew."""

    def __init__(self, dim: int = 16, heads: int = 2, buckets: int = 8) -> None:
        super().__init__()
        self.heads, self.buckets = heads, buckets
        self.qkv, self.bias = nn.Linear(dim, 3 * dim, bias=False), nn.Embedding(buckets, heads)

    def forward(self, x: Tensor) -> Tensor:
        t, half = x.size(1), self.buckets // 2
        distance = torch.arange(t)[None, :] - torch.arange(t)[:, None]
        bucket = (distance > 0).long() * half
        distance = distance.abs()
        exact = half // 2
        large = exact + (torch.log(distance.float() / exact) / math.log(32 / exact) * (half - exact)).to(torch.long)
        bucket += torch.where(distance < exact, distance, torch.min(large, torch.full_like(large, half - 1)))
        q, k, v = (split(p, self.heads) for p in self.qkv(x).chunk(3, -1))
        score = q @ k.transpose(-1, -2) + self.bias(bucket).permute(2, 0, 1)
        return (score.softmax(-1) @ v).transpose(1, 2).flatten(2)
