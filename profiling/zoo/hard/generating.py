"""Sampling and search inside of a forward, adapted and quantised weights, splines as activations."""

from __future__ import annotations

import itertools
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class BeamSearch(nn.Module):
    """An LSTM translated with a beam: hypotheses reordered by their parents, ended ones frozen, the best by length. (N, 6)."""

    def __init__(self, words: int = 9, dim: int = 6, width: int = 3, steps: int = 5, end: int = 1) -> None:
        super().__init__()
        self.width, self.steps, self.end = width, steps, end
        self.embed, self.cell, self.out = nn.Embedding(words, dim), nn.LSTMCell(dim, dim), nn.Linear(dim, words)

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        n, k, v = state.size(0), self.width, self.out.out_features
        h = state.repeat_interleave(k, 0)
        c = torch.zeros_like(h)
        scores = state.new_full((n, k), float("-inf"))
        scores[:, 0] = 0
        tokens = torch.full((n, k, 1), 2, dtype=torch.long)
        done = torch.zeros(n, k, dtype=torch.bool)
        frozen = state.new_full((v,), float("-inf"))
        frozen[self.end] = 0
        for _ in range(self.steps):
            h, c = self.cell(self.embed(tokens[..., -1].reshape(-1)), (h, c))
            logp = F.log_softmax(self.out(h), -1).view(n, k, v)
            logp = torch.where(done.unsqueeze(-1), frozen, logp)
            scores, flat = (scores.unsqueeze(-1) + logp).view(n, -1).topk(k, dim=-1)
            parent, token = torch.div(flat, v, rounding_mode="floor"), flat % v
            tokens = torch.cat([tokens.gather(1, parent.unsqueeze(-1).expand_as(tokens)), token.unsqueeze(-1)], -1)
            rows = (parent + torch.arange(n).unsqueeze(1) * k).view(-1)
            h, c = h.index_select(0, rows), c.index_select(0, rows)
            done = done.gather(1, parent) | (token == self.end)
        length = (tokens != self.end).sum(-1)
        best = (scores / length.to(scores.dtype) ** 0.6).argmax(-1)
        return tokens[torch.arange(n), best], scores


class SpeculativeStep(nn.Module):
    """Leviathan et al. 2023: a draft's tokens verified at once by the target; accepted up to the first refusal, the next by the
    residual's mode. ids (N, L), drafted (N, 3), uniform (N, 3)."""

    def __init__(self, words: int = 12, dim: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, dim)
        self.draft = nn.GRU(dim, dim, batch_first=True)
        self.target = nn.TransformerEncoderLayer(dim, 2, 16, 0.0, batch_first=True)
        self.a, self.b = nn.Linear(dim, words), nn.Linear(dim, words)

    def forward(self, ids: Tensor, drafted: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
        k = drafted.size(1)
        x = self.embed(torch.cat([ids, drafted], 1))
        q = self.a(self.draft(x)[0])[:, -k - 1 : -1].softmax(-1)
        mask = nn.Transformer.generate_square_subsequent_mask(x.size(1), dtype=x.dtype)
        p = self.b(self.target(x, src_mask=mask, is_causal=True))[:, -k - 1 :].softmax(-1)
        pick = lambda t: t.gather(2, drafted.unsqueeze(2)).squeeze(2)  # noqa: E731
        accepted = uniform < (pick(p[:, :-1]) / pick(q)).clamp(max=1)
        count = accepted.int().cumprod(1).sum(1)
        q = F.pad(q, (0, 0, 0, 1))
        here = count.view(-1, 1, 1).expand(-1, 1, p.size(-1)).long()
        residual = F.relu(p.gather(1, here) - q.gather(1, here)).squeeze(1)
        token = residual.argmax(-1)
        out = torch.cat([drafted, drafted.new_zeros(len(ids), 1)], 1)
        out = out.masked_fill(torch.arange(k + 1) > count.unsqueeze(1), 0)
        return out.scatter(1, count.unsqueeze(1).long(), token.unsqueeze(1)), count


class Transducer(nn.Module):
    """RNN-T (Graves 2012): encoder, prediction network, joint, and the loss by forward variables over the lattice.
    (N, T, 5), targets (N, U)."""

    def __init__(self, dim: int = 5, words: int = 6, hidden: int = 8) -> None:
        super().__init__()
        self.encoder, self.embed = nn.LSTM(dim, hidden, batch_first=True), nn.Embedding(words, hidden)
        self.predict, self.joint = nn.LSTM(hidden, hidden, batch_first=True), nn.Linear(hidden, words)

    def forward(self, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        f = self.encoder(x)[0]
        g = self.predict(self.embed(F.pad(targets, (1, 0))))[0]
        logp = self.joint(torch.tanh(f.unsqueeze(2) + g.unsqueeze(1))).log_softmax(-1)
        n, length, u1, _ = logp.shape
        blank = logp[..., 0]
        emit = logp[:, :, :-1].gather(3, targets[:, None, :, None].expand(-1, length, -1, -1)).squeeze(3)
        alpha = [[None] * u1 for _ in range(length)]
        for t in range(length):
            for u in range(u1):
                if t == u == 0:
                    alpha[t][u] = x.new_zeros(n)
                elif u == 0:
                    alpha[t][u] = alpha[t - 1][u] + blank[:, t - 1, u]
                elif t == 0:
                    alpha[t][u] = alpha[t][u - 1] + emit[:, t, u - 1]
                else:
                    alpha[t][u] = torch.logaddexp(
                        alpha[t - 1][u] + blank[:, t - 1, u], alpha[t][u - 1] + emit[:, t, u - 1]
                    )
        return -(alpha[-1][-1] + blank[:, -1, -1]), logp


class ImplicitDiffusion(nn.Module):
    """DDIM (Song et al. 2021) as a module: a small denoiser, time codes, a few steps with clipping. Noise (N, 1, 8, 8)."""

    def __init__(self, width: int = 8, steps: int = 4, total: int = 100) -> None:
        super().__init__()
        beta = torch.linspace(1e-4, 0.02, total, dtype=torch.float64)
        self.register_buffer("alphas", torch.cumprod(1 - beta, 0).float())
        self.steps, self.total, self.width = steps, total, width
        self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.inward, self.down = nn.Conv2d(1, width, 3, padding=1), nn.Conv2d(width, width, 3, 2, 1)
        self.norm, self.up = nn.GroupNorm(4, width), nn.ConvTranspose2d(width, width, 4, 2, 1)
        self.out = nn.Conv2d(2 * width, 1, 3, padding=1)

    def denoise(self, x: Tensor, t: Tensor) -> Tensor:
        half = self.width // 2
        rate = torch.exp(-math.log(10000) * torch.arange(half, dtype=torch.float32) / (half - 1))
        angle = t[:, None].float() * rate[None]
        code = self.time(torch.cat([angle.sin(), angle.cos()], 1).to(x.dtype))
        a = self.inward(x)
        b = F.silu(self.norm(self.down(a) + code[:, :, None, None]))
        return self.out(torch.cat([a, self.up(b)], 1))

    @torch.no_grad()
    def forward(self, noise: Tensor) -> Tensor:
        times = torch.linspace(self.total - 1, 0, self.steps + 1).long().tolist()
        x = noise
        for now, then in itertools.pairwise(times):
            t = torch.full((x.shape[0],), now, device=x.device, dtype=torch.long)
            a, b = self.alphas[t].view(-1, 1, 1, 1).to(x.dtype), self.alphas[then].to(x.dtype)
            eps = self.denoise(x, t)
            start = ((x - (1 - a).sqrt() * eps) / a.sqrt()).clamp(-1, 1)
            x = b.sqrt() * start + (1 - b).sqrt() * (x - a.sqrt() * start) / (1 - a).sqrt()
        return x


class MaskedTokens(nn.Module):
    """MaskGIT (Chang et al. 2022): tokens filled in by confidence on a cosine schedule, without noise. (N, L) ids."""

    def __init__(self, words: int = 16, dim: int = 8, steps: int = 3) -> None:
        super().__init__()
        self.words, self.steps = words, steps
        self.embed = nn.Embedding(words + 1, dim)
        self.body = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(dim, 2, 16, 0.0, "gelu", batch_first=True), 2, enable_nested_tensor=False
        )
        self.head = nn.Linear(dim, words)

    def forward(self, given: Tensor) -> Tensor:
        ids = torch.where(given % 2 == 0, given, torch.full_like(given, self.words))
        unknown = (ids == self.words).sum(1)
        for step in range(self.steps):
            logits = self.head(self.body(self.embed(ids)))
            confidence, guess = logits.softmax(-1).max(-1)
            masked = ids == self.words
            guess = torch.where(masked, guess, ids)
            confidence = confidence.masked_fill(~masked, math.inf)
            ratio = math.cos(math.pi / 2 * (step + 1) / self.steps)
            left = torch.floor(unknown * ratio).long()
            cut = confidence.sort(-1).values.gather(1, left.unsqueeze(1))
            ids = torch.where(confidence < cut, self.words, guess)
        return ids


class Adapted(nn.Module):
    """LoRA (Hu et al. 2021) on 4-bit weights (QLoRA): packed nibbles and block scales in buffers, a shared adapter. (N, 16)."""

    def __init__(self, dim: int = 16, rank: int = 2, block: int = 8, alpha: float = 4.0) -> None:
        super().__init__()
        self.block, self.scaling, self.dim = block, alpha / rank, dim
        levels = torch.tensor(
            [-1.0, -0.7, -0.53, -0.39, -0.28, -0.18, -0.09, 0.0, 0.08, 0.16, 0.25, 0.34, 0.44, 0.56, 0.72, 1]
        )
        self.register_buffer("levels", levels)
        weight = torch.randn(2, dim * dim // block, block) / dim**0.5
        scale = weight.abs().amax(-1, keepdim=True)
        codes = ((weight / scale).unsqueeze(-1) - levels).abs().argmin(-1).to(torch.uint8).view(2, -1, 2)
        self.register_buffer("packed", codes[..., 0] << 4 | codes[..., 1])
        self.register_buffer("scale", scale)
        self.a, self.b = nn.Parameter(torch.randn(rank, dim) / 4), nn.Parameter(torch.randn(dim, rank) / 4)

    def weight(self, i: int, like: Tensor) -> Tensor:
        high, low = self.packed[i] >> 4, self.packed[i] & 0xF
        codes = torch.stack([high, low], -1).view(-1, self.block)
        return (self.levels[codes.long()] * self.scale[i]).view(self.dim, self.dim).to(like.dtype)

    def forward(self, x: Tensor) -> Tensor:
        for i in range(2):
            x = F.linear(x, self.weight(i, x)) + self.scaling * (x @ self.a.T @ self.b.T)
            x = F.gelu(x, approximate="tanh") if i == 0 else x
        return x


class IntegerLinear(nn.Module):
    """LLM.int8 (Dettmers et al. 2022) without outliers: scales by rows and columns, integer products. (N, 12)."""

    def __init__(self, dim: int = 12, out: int = 5) -> None:
        super().__init__()
        w = torch.randn(out, dim)
        scale = w.abs().max(dim=1, keepdim=True)[0] / 127
        self.register_buffer("weight", torch.clamp(torch.round(w / scale), -128, 127).to(torch.int8))
        self.register_buffer("scale", scale.squeeze(1))
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        step = x.abs().amax(dim=-1, keepdim=True).clamp(min=1e-5).div(127)
        codes = x.div(step).round().clamp_(-128, 127).to(torch.int8)
        sums = torch.matmul(codes.to(torch.int32), self.weight.to(torch.int32).t())
        return sums.to(x.dtype) * step * self.scale


class KolmogorovArnold(nn.Module):
    """KAN (Liu et al. 2024) in its efficient form: B-splines by de Boor's recursion on extended grids. (N, 3)."""

    def __init__(self, sizes: tuple[int, ...] = (3, 4, 2), cells: int = 5, order: int = 3) -> None:
        super().__init__()
        self.order = order
        h = 2 / cells
        grid = torch.arange(-order, cells + order + 1) * h - 1
        self.base, self.spline, self.scaler = nn.ParameterList(), nn.ParameterList(), nn.ParameterList()
        for i, (a, b) in enumerate(itertools.pairwise(sizes)):
            self.register_buffer(f"grid{i}", grid.expand(a, -1).contiguous())
            self.base.append(nn.Parameter(torch.randn(b, a) / a**0.5))
            self.spline.append(nn.Parameter(torch.randn(b, a, cells + order) / 3))
            self.scaler.append(nn.Parameter(torch.randn(b, a)))

    def splines(self, x: Tensor, grid: Tensor) -> Tensor:
        x = x.unsqueeze(-1)
        bases = ((x >= grid[:, :-1]) & (x < grid[:, 1:])).to(x.dtype)
        for k in range(1, self.order + 1):
            left = (x - grid[:, : -(k + 1)]) / (grid[:, k:-1] - grid[:, : -(k + 1)]) * bases[:, :, :-1]
            right = (grid[:, k + 1 :] - x) / (grid[:, k + 1 :] - grid[:, 1:-k]) * bases[:, :, 1:]
            bases = left + right
        return bases.contiguous()

    def forward(self, x: Tensor) -> Tensor:
        for i, (base, spline, scaler) in enumerate(zip(self.base, self.spline, self.scaler, strict=True)):
            weight = (spline * scaler.unsqueeze(-1)).view(base.size(0), -1)
            curve = F.linear(self.splines(x, getattr(self, f"grid{i}")).view(x.size(0), -1), weight)
            x = F.linear(F.silu(x), base) + curve
        return x


class PointerGenerator(nn.Module):
    """See et al. 2017: words from the vocabulary or copied from the source, with coverage. (N, L) ids, (N, D) words."""

    def __init__(self, words: int = 15, extra: int = 3, dim: int = 6) -> None:
        super().__init__()
        self.extra, self.embed = extra, nn.Embedding(words, dim)
        self.encoder = nn.LSTM(dim, dim, batch_first=True, bidirectional=True)
        self.cell, self.reduce = nn.LSTMCell(3 * dim, dim), nn.Linear(2 * dim, dim)
        self.wh, self.ws = nn.Linear(2 * dim, dim, bias=False), nn.Linear(dim, dim)
        self.wc, self.v = nn.Linear(1, dim, bias=False), nn.Linear(dim, 1, bias=False)
        self.out, self.switch = nn.Linear(3 * dim, words), nn.Linear(6 * dim, 1)

    def forward(self, source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        known = source.clamp(max=self.embed.num_embeddings - 1)
        memory, (h, c) = self.encoder(self.embed(known))
        h, c = (self.reduce(torch.cat(list(t), -1)) for t in (h, c))
        coverage = torch.zeros_like(source, dtype=memory.dtype)
        context = memory.mean(1)
        results, penalty = [], 0.0
        for t in range(target.size(1)):
            x = torch.cat([self.embed(target[:, t]), context], -1)
            h, c = self.cell(x, (h, c))
            e = torch.tanh(self.wh(memory) + self.ws(h).unsqueeze(1) + self.wc(coverage.unsqueeze(2)))
            a = self.v(e).squeeze(2).softmax(1)
            penalty = penalty + torch.min(a, coverage).sum(1)
            coverage = coverage + a
            context = torch.bmm(a.unsqueeze(1), memory).squeeze(1)
            p = torch.sigmoid(self.switch(torch.cat([context, h, x], -1)))
            words = p * F.softmax(self.out(torch.cat([h, context], -1)), -1)
            words = torch.cat([words, words.new_zeros(len(source), self.extra)], 1)
            results.append(words.scatter_add(1, source, (1 - p) * a))
        return torch.log(torch.stack(results, 1) + 1e-10), penalty
