"""Message passing: nodes gather along edges and scatter back. `edges` is (2, E): sources, then targets."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def mlp(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in pairwise(sizes):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def segment_mean(x: Tensor, index: Tensor, size: int) -> Tensor:
    total = x.new_zeros(size, x.size(-1)).index_add(0, index, x)
    count = torch.bincount(index, minlength=size).clamp(min=1)
    return total / count.unsqueeze(-1)


def segment_softmax(scores: Tensor, index: Tensor, size: int) -> Tensor:
    """Softmax over the entries of equal index; (E, H)."""
    at = index.unsqueeze(-1).expand_as(scores)
    top = torch.full((size, scores.size(-1)), float("-inf"), dtype=scores.dtype).scatter_reduce(0, at, scores, "amax")
    weights = (scores - top[index]).exp()
    total = torch.zeros(size, scores.size(-1), dtype=scores.dtype).scatter_add_(0, at, weights)
    return weights / (total[index] + 1e-16)


class GCN(nn.Module):
    """Kipf and Welling 2017: two layers with self loops and symmetric normalisation by degree."""

    def __init__(self, features: int = 8, hidden: int = 16, classes: int = 4) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(features, hidden), nn.Linear(hidden, classes)

    def propagate(self, x: Tensor, edges: Tensor) -> Tensor:
        loops = torch.arange(x.size(0), device=x.device).repeat(2, 1)
        source, target = torch.cat([edges, loops], 1)
        degree = torch.zeros(x.size(0), dtype=x.dtype).scatter_add_(0, target, torch.ones(len(target), dtype=x.dtype))
        scale = degree.pow(-0.5)
        scale[torch.isinf(scale)] = 0
        weight = scale[source] * scale[target]
        return torch.zeros_like(x).index_add_(0, target, x[source] * weight.unsqueeze(1))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        x = F.relu(self.propagate(self.first(x), edges))
        return F.log_softmax(self.propagate(self.second(x), edges), dim=1)


class GAT(nn.Module):
    """Velickovic et al. 2018: attention over neighbours, softmax by target."""

    def __init__(self, features: int = 8, hidden: int = 8, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.hidden = heads, hidden
        self.project = nn.Linear(features, heads * hidden, bias=False)
        self.att_source = nn.Parameter(torch.randn(1, heads, hidden) / 3)
        self.att_target = nn.Parameter(torch.randn(1, heads, hidden) / 3)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        n = x.size(0)
        h = self.project(x).view(n, self.heads, self.hidden)
        source, target = edges
        score = (h * self.att_source).sum(-1)[source] + (h * self.att_target).sum(-1)[target]
        alpha = segment_softmax(F.leaky_relu(score, 0.2), target, n)
        out = torch.zeros_like(h).index_add_(0, target, h[source] * alpha.unsqueeze(-1))
        return F.elu(out.flatten(1))


class GraphSAGE(nn.Module):
    """Hamilton et al. 2017: the mean of neighbours beside the node itself, rows normalised."""

    def __init__(self, features: int = 8, hidden: int = 16) -> None:
        super().__init__()
        self.own, self.other = nn.Linear(features, hidden), nn.Linear(features, hidden, bias=False)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        mean = segment_mean(x[edges[0]], edges[1], x.size(0))
        return F.normalize(F.relu(self.own(x) + self.other(mean)), dim=-1)


class SagePool(nn.Module):
    """GraphSAGE with max pooling of transformed neighbours by scatter_reduce."""

    def __init__(self, features: int = 8, hidden: int = 16) -> None:
        super().__init__()
        self.pool, self.out = nn.Linear(features, hidden), nn.Linear(features + hidden, hidden)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        sent = F.relu(self.pool(x))[edges[0]]
        index = edges[1].unsqueeze(1).expand(-1, sent.size(1))
        best = sent.new_zeros(x.size(0), sent.size(1)).scatter_reduce_(
            0, index, sent, reduce="amax", include_self=False
        )
        return self.out(torch.cat([x, best], 1))


class GIN(nn.Module):
    """Xu et al. 2019: sums of neighbours, and a sum for each graph of the batch; the number of graphs is read from `batch`."""

    def __init__(self, features: int = 8, hidden: int = 16, classes: int = 3) -> None:
        super().__init__()
        self.eps = nn.Parameter(torch.zeros(2))
        self.layers = nn.ModuleList([mlp(features, hidden, hidden), mlp(hidden, hidden, hidden)])
        self.norms = nn.ModuleList([nn.BatchNorm1d(hidden), nn.BatchNorm1d(hidden)])
        self.classify = nn.Linear(hidden, classes)

    def forward(self, x: Tensor, edges: Tensor, batch: Tensor) -> Tensor:
        source, target = edges[0], edges[1]
        for i, (layer, norm) in enumerate(zip(self.layers, self.norms, strict=True)):
            summed = torch.zeros_like(x).index_add_(0, target, x.index_select(0, source))
            x = F.relu(norm(layer((1 + self.eps[i]) * x + summed)))
        graphs = int(batch.max()) + 1
        pooled = x.new_zeros(graphs, x.size(1)).index_add_(0, batch, x)
        return self.classify(pooled)


class MPNN(nn.Module):
    """Gilmer et al. 2017: messages through a matrix made from edge features, a GRU cell updates the nodes."""

    def __init__(self, features: int = 8, edge: int = 4, hidden: int = 12, steps: int = 3) -> None:
        super().__init__()
        self.hidden, self.steps = hidden, steps
        self.embed = nn.Linear(features, hidden)
        self.edge_net = mlp(edge, 16, hidden * hidden)
        self.gru = nn.GRUCell(hidden, hidden)
        self.read = nn.Linear(hidden, 1)

    def forward(self, x: Tensor, edges: Tensor, attr: Tensor) -> Tensor:
        h = F.relu(self.embed(x))
        matrix = self.edge_net(attr).view(-1, self.hidden, self.hidden)
        for _ in range(self.steps):
            message = torch.bmm(h[edges[0]].unsqueeze(1), matrix).squeeze(1)
            h = self.gru(segment_mean(message, edges[1], x.size(0)), h)
        return self.read(h).sum(0)


class SchNet(nn.Module):
    """Schutt et al. 2018: continuous-filter convolutions over atom pairs within a cutoff, energies by molecule."""

    def __init__(self, hidden: int = 16, gaussians: int = 10, cutoff: float = 3.0) -> None:
        super().__init__()
        self.cutoff = cutoff
        self.embed = nn.Embedding(10, hidden, padding_idx=0)
        self.register_buffer("offset", torch.linspace(0, cutoff, gaussians))
        self.filter = nn.Sequential(nn.Linear(gaussians, hidden), nn.Softplus(), nn.Linear(hidden, hidden))
        self.inward, self.outward = nn.Linear(hidden, hidden, bias=False), mlp(hidden, hidden, 1)

    def forward(self, z: Tensor, pos: Tensor, batch: Tensor) -> Tensor:
        distance = (pos.unsqueeze(0) - pos.unsqueeze(1)).norm(dim=-1)
        near = (batch.unsqueeze(0) == batch.unsqueeze(1)) & (distance < self.cutoff)
        near.fill_diagonal_(False)
        source, target = near.nonzero(as_tuple=True)
        d = distance[source, target]
        basis = torch.exp(-2.0 * (d.unsqueeze(-1) - self.offset) ** 2)
        window = 0.5 * (torch.cos(d * torch.pi / self.cutoff) + 1)
        h = self.embed(z)
        sent = self.inward(h)[source] * self.filter(basis) * window.unsqueeze(-1)
        h = h + torch.zeros_like(h).index_add(0, target, sent)
        energy = self.outward(h)
        return torch.zeros(int(batch.max()) + 1, 1, dtype=h.dtype).index_add(0, batch, energy)


class DimeNet(nn.Module):
    """Gasteiger et al. 2020, in short: messages of edges updated from angles of triplets k -> j -> i."""

    def __init__(self, hidden: int = 12, radial: int = 6, angular: int = 5) -> None:
        super().__init__()
        self.register_buffer("frequency", torch.arange(1, radial + 1).float() * torch.pi)
        self.register_buffer("order", torch.arange(angular).float())
        self.edge = nn.Linear(radial, hidden)
        self.triplet = nn.Bilinear(angular, hidden, hidden)
        self.out = nn.Linear(hidden, 2)

    def forward(self, pos: Tensor, edges: Tensor, triplets: Tensor) -> Tensor:
        j, i = edges
        vector = pos[i] - pos[j]
        d = vector.norm(dim=-1, keepdim=True).clamp(min=0.1)
        message = F.silu(self.edge(torch.sin(self.frequency * d / 5) / d))
        kj, ji = triplets
        a, b = vector[ji], -vector[kj]
        angle = torch.atan2(torch.linalg.cross(a, b).norm(dim=-1), (a * b).sum(-1))
        basis = torch.cos(angle.unsqueeze(-1) * self.order)
        update = self.triplet(basis, message[kj])
        message = message + torch.zeros_like(message).index_add_(0, ji, update)
        nodes = torch.zeros(pos.size(0), message.size(1), dtype=pos.dtype).index_add_(0, i, message)
        return self.out(nodes)


class GatedGraph(nn.Module):
    """GGNN (Li et al. 2016): a GRU over summed messages, with a linear map for each type of edge."""

    def __init__(self, hidden: int = 12, kinds: int = 3, steps: int = 3) -> None:
        super().__init__()
        self.steps = steps
        self.weight = nn.Parameter(torch.randn(kinds, hidden, hidden) / 4)
        self.cell = nn.GRUCell(hidden, hidden)

    def forward(self, x: Tensor, edges: Tensor, kind: Tensor) -> Tensor:
        for _ in range(self.steps):
            message = torch.einsum("ei,eij->ej", x[edges[0]], self.weight[kind])
            x = self.cell(torch.zeros_like(x).index_add_(0, edges[1], message), x)
        return x


class RGCN(nn.Module):
    """Schlichtkrull et al. 2018: basis matrices by relation; edges of each relation are picked with a mask."""

    def __init__(self, features: int = 8, hidden: int = 10, relations: int = 3, bases: int = 2) -> None:
        super().__init__()
        self.basis = nn.Parameter(torch.randn(bases, features, hidden) / 3)
        self.coefficient = nn.Parameter(torch.randn(relations, bases))
        self.own = nn.Linear(features, hidden)

    def forward(self, x: Tensor, edges: Tensor, kind: Tensor) -> Tensor:
        weight = torch.einsum("rb,bio->rio", self.coefficient, self.basis)
        out = self.own(x)
        for r in range(weight.size(0)):
            source, target = edges[:, kind == r]
            out = out + segment_mean(x[source] @ weight[r], target, x.size(0))
        return F.relu(out)


class ChebNet(nn.Module):
    """Defferrard et al. 2016: Chebyshev polynomials of the scaled Laplacian, a dense matrix made by an indexed write."""

    def __init__(self, features: int = 8, hidden: int = 10, order: int = 4) -> None:
        super().__init__()
        self.weights = nn.ModuleList(nn.Linear(features, hidden, bias=False) for _ in range(order))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        n = x.size(0)
        a = torch.zeros(n, n, dtype=x.dtype)
        a[edges[0], edges[1]] = 1
        a = torch.maximum(a, a.t())
        scale = a.sum(1).clamp(min=1).rsqrt()
        lap = -scale.unsqueeze(1) * a * scale
        before, now = x, lap @ x
        out = self.weights[0](before) + self.weights[1](now)
        for w in self.weights[2:]:
            before, now = now, 2 * (lap @ now) - before
            out = out + w(now)
        return out


class EGNN(nn.Module):
    """Satorras et al. 2021: equivariant updates of coordinates and features along edges."""

    def __init__(self, hidden: int = 10, layers: int = 2) -> None:
        super().__init__()
        self.edge = nn.ModuleList(mlp(2 * hidden + 1, 16, hidden) for _ in range(layers))
        self.coord = nn.ModuleList(mlp(hidden, 16, 1) for _ in range(layers))
        self.node = nn.ModuleList(mlp(2 * hidden, 16, hidden) for _ in range(layers))

    def forward(self, h: Tensor, pos: Tensor, edges: Tensor) -> tuple[Tensor, Tensor]:
        row, col = edges
        for edge, coord, node in zip(self.edge, self.coord, self.node, strict=True):
            diff = pos[row] - pos[col]
            radial = diff.pow(2).sum(1, keepdim=True)
            message = edge(torch.cat([h[row], h[col], radial], dim=1))
            pos = pos + segment_mean(diff / (radial.sqrt() + 1) * coord(message), row, pos.size(0))
            summed = message.new_zeros(h.size(0), message.size(1))
            summed.scatter_add_(0, row.unsqueeze(-1).expand(-1, message.size(1)), message)
            h = h + node(torch.cat([h, summed], 1))
        return h, pos


class TopKPool(nn.Module):
    """Graph U-Net's pooling (Gao and Ji 2019): the best nodes by a learned score, edges relabelled and filtered."""

    def __init__(self, features: int = 8, keep: float = 0.5) -> None:
        super().__init__()
        self.keep = keep
        self.score, self.lin = nn.Parameter(torch.randn(features)), nn.Linear(features, features)

    def forward(self, x: Tensor, edges: Tensor) -> tuple[Tensor, Tensor]:
        score = torch.tanh((x * self.score).sum(-1) / self.score.norm())
        value, kept = score.topk(int(x.size(0) * self.keep))
        x = x[kept] * value.unsqueeze(-1)
        relabel = kept.new_full((score.size(0),), -1)
        relabel[kept] = torch.arange(kept.numel())
        row, col = relabel[edges[0]], relabel[edges[1]]
        valid = (row >= 0) & (col >= 0)
        row, col = row[valid], col[valid]
        return self.lin(x).index_add(0, col, x[row]), kept


class HyperGraph(nn.Module):
    """HyperConv (Feng et al. 2019): nodes to hyperedges and back, both normalised by degree. incidence: (2, M)."""

    def __init__(self, features: int = 8, hidden: int = 10) -> None:
        super().__init__()
        self.lin = nn.Linear(features, hidden)

    def forward(self, x: Tensor, incidence: Tensor) -> Tensor:
        node, group = incidence
        groups = int(group.max().item()) + 1
        x = self.lin(x)
        edge = segment_mean(x[node], group, groups)
        return F.leaky_relu(segment_mean(edge[group], node, x.size(0)))


class PNA(nn.Module):
    """Corso et al. 2020: mean, max, min and deviation of neighbours, scaled by the logarithm of the degree."""

    def __init__(self, features: int = 6, hidden: int = 10) -> None:
        super().__init__()
        self.post = nn.Linear(features * 13, hidden)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        sent, n = x[edges[0]], x.size(0)
        index = edges[1].view(-1, 1).expand_as(sent)

        def reduced(values: Tensor, how: str) -> Tensor:
            return torch.zeros(n, x.size(1), dtype=x.dtype).scatter_reduce(0, index, values, how, include_self=False)

        mean = reduced(sent, "mean")
        std = (reduced(sent * sent, "mean") - mean * mean).clamp(min=0).add(1e-5).sqrt()
        every = torch.cat([mean, reduced(sent, "amax"), reduced(sent, "amin"), std], -1)
        degree = torch.bincount(edges[1], minlength=n).to(x.dtype).add(1).log().unsqueeze(-1)
        scaled = torch.cat([every, every * degree, every / degree.clamp(min=0.5)], -1)
        return self.post(torch.cat([x, scaled], -1))


class GraphTransformer(nn.Module):
    """Attention between the nodes of one graph: nodes packed into a padded batch by counts, masked, and unpacked."""

    def __init__(self, features: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(features, heads, batch_first=True)
        self.norm = nn.LayerNorm(features)

    def forward(self, x: Tensor, batch: Tensor) -> Tensor:
        count = torch.bincount(batch)
        first = torch.cat([count.new_zeros(1), count.cumsum(0)[:-1]])
        place = torch.arange(x.size(0)) - first[batch]
        longest = int(count.max())
        dense = x.new_zeros(count.numel(), longest, x.size(1))
        dense[batch, place] = x
        pad = torch.arange(longest).unsqueeze(0) >= count.unsqueeze(1)
        mixed, _ = self.attention(dense, dense, dense, key_padding_mask=pad, need_weights=False)
        return self.norm(x + mixed[batch, place])


class CrystalGraph(nn.Module):
    """CGCNN (Xie and Grossman 2018): a fixed number of neighbours by index, gated sums, crystals by one-hot matrices."""

    def __init__(self, features: int = 8, edge: int = 4, hidden: int = 12) -> None:
        super().__init__()
        self.embed = nn.Linear(features, hidden)
        self.gate = nn.Linear(2 * hidden + edge, 2 * hidden)
        self.norm, self.out = nn.BatchNorm1d(2 * hidden), nn.Linear(hidden, 1)

    def forward(self, x: Tensor, attr: Tensor, near: Tensor, crystal: Tensor) -> Tensor:
        x = self.embed(x)
        n, m = near.shape
        both = torch.cat([x.unsqueeze(1).expand(n, m, x.size(1)), x[near, :], attr], 2)
        gated = self.norm(self.gate(both).view(n * m, -1)).view(n, m, -1)
        score, core = gated.chunk(2, dim=2)
        x = F.softplus(x + (score.sigmoid() * F.softplus(core)).sum(1))
        member = F.one_hot(crystal, 3).to(x.dtype)
        return self.out(member.t() @ x / member.sum(0).clamp(min=1).unsqueeze(1))
