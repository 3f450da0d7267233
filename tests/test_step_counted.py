"""Training steps of nets in which values say how many rows are computed: equal to eager training and to torch in float64."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import needle as ndl
import torch2needle
from needle import ops
from needle.autograd import Unsupported


class Net(nn.Module):
    def __init__(self, forward):
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4)
        self.rows, self.drop = nn.Embedding(6, 4), nn.Dropout(0.5)
        self.called = forward

    def forward(self, x, m):
        return self.called(self, self.first(x).clone(), m)


def update(s, x, m):
    x[m] = s.norm(s.second(x[m]))
    return x


def two_masks(s, x, m):
    x[m] = s.rows.weight[0]
    x[~m] += s.rows.weight[1]
    return x


def equal_masks(s, x, m):
    y = x.clone()
    y[x[..., 0] > 0] = s.second(x[x[..., 0] > 0]) * s.rows.weight[2]
    return y


def into_zeros(s, x, m):
    y = torch.zeros_like(x)
    y[m] = F.softmax(s.second(x[m]), -1)
    return y


def logs(s, x, m):
    """Of what is not picked the logarithm would be NaN, and so would its gradient."""
    x[x > 0.2] = torch.log(x[x > 0.2])
    return x


def places(s, x, m):
    i, j = torch.where(m)
    y = torch.zeros(x.shape[0], 4, dtype=x.dtype)
    return y.index_add(0, i, s.second(x[i, j]) * s.rows(j))


def columns(s, x, m):
    i = m.nonzero()
    y = x.clone()
    y[i[:, 0], i[:, 1]] = F.gelu(x[i[:, 0], i[:, 1]]) + s.rows(i[:, 1])
    return y


def second_axis(s, x, m):
    (i,) = torch.where(m[0])
    y = x.clone()
    y[:, i] = s.second(y[:, i])
    return y


def full_rows(s, x, m):
    x[torch.where(m.sum(-1) == m.shape[-1])] = 0.5
    x[m.sum(-1) == 0] = s.rows.weight[3]
    return x


def views(s, x, m):
    h = x[m].view(-1, 2, 2).transpose(1, 2)
    a, b = (h @ h.transpose(1, 2)).reshape(-1, 4).chunk(2, -1)
    x[m] = torch.stack([a, b], 1).flatten(1) + F.pad(x[m][:, :2], (1, 1))
    return x


def experts(s, x, m):
    x = x.reshape(-1, 4)
    w, chosen = s.second(x)[:, :3].softmax(-1).topk(2, -1)
    out = torch.zeros_like(x)
    for k, layer in enumerate((s.first, s.second, s.norm)):
        row, slot = torch.where(chosen == k)
        out[row] += w[row, slot, None] * layer(x[row])
    return out


def summed(s, x, m):
    return x[m].sum() / 10 + torch.masked_select(x, m[..., None]).sum() / 7


def scattered(s, x, m):
    i, j = torch.where(m)
    return torch.zeros(5, dtype=x.dtype).scatter_add(0, j, s.second(x[i, j]).sum(-1))


def averaged(s, x, m):
    return x[m].mean(0) + x[m].pow(2).sum(1).mean() + s.second(x)[m].amax(0)


def cross_entropy(s, x, m):
    return F.cross_entropy(s.second(x[m]), torch.full_like(m, 1, dtype=torch.long)[m])


def distances(s, x, m):
    return F.mse_loss(x[m], s.second(x)[m]) + F.smooth_l1_loss(x[m], x[m] * 0.5, reduction="sum") / 10


def pooled(s, x, m):
    """Weights that are those of all rows together, none of which there may be."""
    n = x[m]
    x[m] = n + s.second(n).log_softmax(0)
    return x.mean() + (s.second(n).softmax(0) * s.norm(n)).sum(0)


def spread(s, x, m):
    n = s.second(x[m])
    return (
        n.std(0) + n.var() + n.var(1, unbiased=False).mean() + x.transpose(1, 2)[:, :, m[0]].var((0, 2), correction=2)
    )


def largest(s, x, m):
    n = s.second(x[m])
    most = n.max(0).values + n.max(0, keepdim=True)[0] * n.logsumexp(0)
    return (most + n.logsumexp((0, 1)) + n.max(1)[0].min()) / 10


def transcribed(s, x, m):
    """Labels of all in one row, as models of speech pick them from what is filled up."""
    labels = (torch.arange(m.numel()).view(m.shape) % 3 + 1)[m]
    logs = F.log_softmax(s.second(x), -1).repeat_interleave(3, 1).transpose(0, 1)
    lengths = torch.full((x.shape[0],), logs.shape[0])
    return x * F.ctc_loss(logs, labels, lengths, m.sum(-1), zero_infinity=True) / 50


NETS = (
    pooled,
    transcribed,
    update,
    two_masks,
    equal_masks,
    into_zeros,
    logs,
    places,
    columns,
    second_axis,
    full_rows,
    views,
    experts,
    summed,
    scattered,
)
FILLED = (averaged, cross_entropy, distances, spread, largest)  # torch has no mean of no rows


def batches(filled):
    torch.manual_seed(1)
    shares = (0.5, 0.3, 0.8, 0.5) if filled else (0.5, 2.0, -1.0, 0.5)  # some, none, all
    return [(torch.randn(3, 5, 4), torch.rand(3, 5) > share) for share in shares]


def theirs(model, data, dtype):
    model = copy.deepcopy(model).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for x, m in data:
        loss = model(x.to(dtype), m).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {k: v.detach().double().numpy() for k, v in model.state_dict().items()}


def loss(y, _):
    return ops.mean(y * y)


def ours(model, data, compiled):
    net = torch2needle.convert(copy.deepcopy(model), data[0]).train()
    optimizer = ndl.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    step = ndl.compile_step(net, loss, optimizer, (data[0], 0)) if compiled else None
    losses = []
    for x, m in data:
        if step is None:
            value = loss(net(x, m), 0)
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            losses.append(float(value.numpy()))
        else:
            losses.append(float(step((x, m), 0)))
    return losses, {k: v.double().numpy() for k, v in torch2needle.to_torch(net).items()}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "step"])
@pytest.mark.parametrize("forward", [*NETS, *FILLED], ids=lambda f: f.__name__)
def test_counted_rows_train_as_in_torch(forward, compiled):
    torch.manual_seed(0)
    model, data = Net(forward), batches(forward in FILLED)
    want, state = theirs(model, data, torch.float64)
    losses, found = ours(model, data, compiled)
    np.testing.assert_allclose(losses, want, rtol=2e-5, atol=1e-7)
    for name, value in state.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=2e-6, err_msg=name)


def divided(s, x, m):
    x[m] = x[m] / x[m].shape[0]
    return x


def dropped(s, x, m):
    x[m] = s.drop(x[m])
    return x


def along_rows(s, x, m):
    x[m] = x[m].cumsum(0)
    return x


def pairs(s, x, m):
    n = x[m]
    return n @ n.T


def other_order(s, x, m):
    y = torch.zeros_like(x)
    y[m] = x.transpose(0, 1)[m.T]
    return y


def other_rows(s, x, m):
    x.masked_scatter_(m[..., None], s.second(x[m]))
    return x


@pytest.mark.parametrize(
    "forward", [divided, dropped, along_rows, pairs, other_order, other_rows], ids=lambda f: f.__name__
)
def test_what_mixes_counted_rows_is_refused_in_a_sentence(forward):
    torch.manual_seed(0)
    model, data = Net(forward), batches(True)
    with pytest.raises(Unsupported, match=r"^\[compile_step\] .*; train it eagerly\.$"):
        ours(model, data, True)


@pytest.mark.parametrize("number", [lambda r: r.shape[0], len, lambda r: r.size], ids=["shape", "len", "size"])
def test_the_number_of_counted_rows_is_no_number(number):
    net, x, m = ndl.nn.Linear(4, 4), np.ones((3, 4), "float32"), np.array([True, False, True])

    def averaged(y, m):
        rows = ops.masked_rows(y, m)
        return ops.summation(rows) / number(rows)

    with pytest.raises(Unsupported, match="how many rows values count is no number in a step"):
        ndl.compile_step(net, averaged, ndl.optim.SGD(net.parameters(), lr=0.1), (x, m))


def test_a_result_of_counted_rows_is_refused():
    net = ndl.nn.Linear(4, 4)
    optimizer = ndl.optim.SGD(net.parameters(), lr=0.1)

    def picked(y, m):
        return ops.mean(ops.masked_rows(y, m)), ops.masked_rows(y, m)

    x, m = np.ones((3, 4), "float32"), np.array([True, False, True])
    with pytest.raises(Unsupported, match="values say how many rows a result has"):
        ndl.compile_step(net, picked, optimizer, (x, m))
    step = ndl.compile_step(net, lambda y, m: picked(y, m)[0], optimizer, (x, m))
    want = float(picked(net(ndl.Tensor(x)), ndl.Tensor(m, dtype="bool"))[0].numpy())
    assert abs(float(step(x, m)) - want) < 1e-6


@pytest.mark.parametrize("weighted", [False, True])
def test_bincount_of_numbers_below_a_limit(weighted):
    """The balance of experts: a step has counts of one size, and refuses numbers beyond."""

    class Balance(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = nn.Linear(4, 3)

        def forward(self, x, g):
            p = self.gate(x).softmax(-1)
            counts = torch.bincount(g, weights=p[:, 0].detach() if weighted else None, minlength=3)
            return 3 * (p.mean(0) * counts / len(x)).sum()

    torch.manual_seed(0)
    model, x, g = Balance(), torch.randn(5, 4), torch.tensor([0, 2, 2, 1, 0])
    net = torch2needle.convert(model, (x, g))
    step = ndl.compile_step(net, lambda out, y: out, ndl.optim.SGD(net.parameters(), lr=0.5), ((x, g), x))
    theirs = torch.optim.SGD(model.parameters(), lr=0.5)
    for given in (g, torch.tensor([1, 1, 1, 1, 0])):
        loss = model(x, given)
        np.testing.assert_allclose(step((x, given), x).numpy(), loss.item(), rtol=1e-5)
        theirs.zero_grad()
        loss.backward()
        theirs.step()
    before = net.gate.weight.numpy().copy()
    np.testing.assert_allclose(before, model.gate.weight.detach().numpy(), rtol=1e-5, atol=1e-6)
    for beyond in ([0, 3, 1, 1, 0], [0, -1, 1, 1, 0]):
        with pytest.raises(ValueError, match="numbers from 0 to 2"):
            step((x, torch.tensor(beyond)), x)
    np.testing.assert_array_equal(net.gate.weight.numpy(), before)
