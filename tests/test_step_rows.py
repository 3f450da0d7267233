"""A compiled step computes no rows that nobody reads: what it leaves out, what it must not, and eager steps beside it."""

import copy

import numpy as np
import pytest

import needle as ndl
from needle import nn, ops
from needle.autograd import Op, Spec
from needle.nn.functional import Guard, GuardError
from needle.ops.nn.attention import scaled_dot_product_attention as attention
from needle.ops.nn.heads import merge_heads, split_heads
from test_compile_step import assert_same, eager_step
from test_kernels import cases, inputs_for

N, L, W = 3, 7, 8


class Net(nn.Module):
    """An encoder layer's parts, of which `made(self, x)` makes the output."""

    def __init__(self, made):
        super().__init__()
        self.made, self.norm, self.last_norm = made, nn.LayerNorm(W), nn.LayerNorm(W)
        self.q, self.k, self.v, self.out, self.up, self.down, self.head = (nn.Linear(W, W) for _ in range(7))
        self.pooled, self.drop = nn.BatchNorm1d(W), nn.Dropout(0.4)

    def forward(self, x):
        return self.head(self.made(self, x))


def encoder(n, x, **options):
    h = n.norm(x)
    q, k, v = (split_heads(f(h), 2) for f in (n.q, n.k, n.v))
    x = x + n.drop(n.out(merge_heads(attention(q, k, v, **options))))
    return n.last_norm(x + n.down(ops.gelu(n.up(x))))


def two_places(n, x):
    y = n.up(x)
    return y[:, 0] + y[:, 1]


def detached_elsewhere(n, x):
    y = n.up(x)
    z = n.down(y.detach())
    return y[:, 0] * z[:, 0]


def residual(n, x):
    y = n.up(x)
    return n.down(y)[:, 1] + y.sum(1)


def many(n, x):
    for _ in range(40):
        x = x + n.up(x) * 0.1
    return x[:, 0]


# by name: the output, and how many values with L rows the forward pass makes beside x
ROWS = {
    "class token": (lambda n, x: encoder(n, x)[:, 0], 5),  # a norm, keys and values with their heads
    "last token": (lambda n, x: encoder(n, x)[:, -1], 5),
    "some tokens": (lambda n, x: encoder(n, x)[:, 2:5].sum(1), 5),
    "one of the batch, all tokens": (lambda n, x: n.down(n.up(x))[0:2], 0),
    "ellipsis": (lambda n, x: n.down(n.up(x))[..., 3, :], 0),
    "slice of a slice": (lambda n, x: n.down(n.up(x)[:, 1:6])[:, 2], 0),
    "a batch norm after": (lambda n, x: n.pooled(ops.relu(n.up(x))[:, 0]), 0),
    "rows of a broadcast": (lambda n, x: (n.up(x) * x[:1])[:, 4], 0),
    "a row of one sample": (lambda n, x: n.up(x[:1])[0, 3] + x[0, 0], 0),
    "every second": (lambda n, x: n.up(x)[:, ::2].sum(1), 1),
    "no axis left out": (lambda n, x: n.up(x)[:, :].sum(1), 1),
    "features": (lambda n, x: (n.up(x)[:, :, 0:1] * x).sum(1), 1),  # a product needs all of a row
    "a long chain of residuals": (many, 0),
    "two places": (two_places, 1),
    "read as a whole, too": (residual, 1),
    "detached elsewhere": (detached_elsewhere, 2),
    "causal": (lambda n, x: encoder(n, x, causal=True)[:, 0], 8),
    "a mask": (lambda n, x: encoder(n, x, mask=ndl.Tensor(np.eye(L), requires_grad=False))[:, 0], 8),
}


def forward_nodes(step, x, y):
    plan, *_ = step._prepare(x, y)
    graph = plan._rewritten[0]
    return [n for n in graph.nodes[: plan.boundary] if n.kind == "op"]


@pytest.mark.parametrize("name", ROWS)
def test_rows_that_nobody_reads_are_left_out(name):
    made, whole = ROWS[name]
    draw = np.random.RandomState(5)
    net = Net(made)
    for p in net.parameters():
        p.data = ndl.Tensor(draw.randn(*p.shape).astype("float32") * 0.5)
    other, x = copy.deepcopy(net), draw.randn(N, L, W).astype("float32")
    y = draw.randint(0, W, copy.deepcopy(net)(ndl.Tensor(x)).shape[:-1] or 1)
    loss = lambda out, y: ops.cross_entropy(ops.reshape(out, (-1, W)), ops.reshape(y, (-1,)))  # noqa: E731
    optimizers = [ndl.optim.SGD(n.parameters(), 0.1, momentum=0.9) for n in (net, other)]
    step = ndl.compile_step(net, loss, optimizers[0], (x, y))
    for turn in range(2):
        np.random.seed(turn)
        got = float(step(x, y))
        np.random.seed(turn)
        want = eager_step(other, loss, optimizers[1], x, y)
        assert got == pytest.approx(want, rel=1e-5)
    assert_same(net, other)
    kinds = ("Linear", "SplitHeads", "LayerNorm", "ScaledDotProductAttention", "MergeHeads")
    found = [n for n in forward_nodes(step, x, y) if n.target.name in kinds and L in n.meta["spec"].shape]
    assert len([n for n in found if n.meta["spec"].shape[0] == N]) == whole, [str(n) for n in found]


def test_results_beside_the_loss_have_their_rows():
    net = Net(lambda n, x: encoder(n, x)[:, 0])
    x, y = np.random.RandomState(1).randn(N, L, W).astype("float32"), np.zeros(N, "int64")
    loss = lambda out, y: (ops.cross_entropy(out, y), ops.argmax(out, 1), out.detach() * 2)  # noqa: E731
    want = net.eval()(ndl.Tensor(x)).numpy()
    step = ndl.compile_step(net, loss, ndl.optim.SGD(net.parameters(), 0.0), (x, y))
    _, best, twice = step(x, y)
    np.testing.assert_allclose(np.asarray(twice), 2 * want, atol=1e-5)
    np.testing.assert_array_equal(np.asarray(best), want.argmax(1))


def test_guards_look_at_all_rows():
    """Also at those that the result does not read."""

    def guarded(n, x):
        y = n.up(x)
        Guard((1.0,), "y.sum() < 1e6")(ops.lt(y.sum(), 1e6))
        return y[:, 0]

    net, x, y = Net(guarded), np.zeros((N, L, W), "float32"), np.zeros(N, "int64")
    step = ndl.compile_step(net, ops.cross_entropy, ndl.optim.SGD(net.parameters(), 0.1), (x, y))
    other = copy.deepcopy(net)
    want = eager_step(other, ops.cross_entropy, ndl.optim.SGD(other.parameters(), 0.1), x, y)
    assert float(step(x, y)) == pytest.approx(want, rel=1e-6)
    before = {k: t.numpy().copy() for k, t in net.state_dict().items()}
    x[:, 1] = 1e9 * np.sign(net.up.weight.numpy().sum(1))
    with pytest.raises(GuardError, match="1e6"):
        step(x, y)
    assert all(np.array_equal(before[k], t.numpy()) for k, t in net.state_dict().items())


def test_sources_of_ops_hold_on_their_samples():
    """Rows of a result are what the same rows of its inputs give."""
    seen = set()
    told = [case.values for case in cases() if type(case.values[0]).sources is not Op.sources]
    for op, shapes in told:
        inputs = inputs_for(op, shapes)
        specs, whole = [Spec(a.shape) for a in inputs], op.reference(*inputs)
        for axis in range(0 if whole is None else whole.ndim):  # a shape that broadcasts has no reference
            axes = op.sources(axis, whole, *specs)
            if axes is None or whole.shape[axis] < 2:
                continue
            parts = [a if at is None else np.take(a, [1], at) for a, at in zip(inputs, axes, strict=True)]
            np.testing.assert_allclose(op.reference(*parts), np.take(whole, [1], axis), rtol=1e-5, atol=1e-6)
            seen.add(op.name)
    assert seen >= {"Linear", "LayerNorm", "SplitHeads", "MergeHeads", "ScaledDotProductAttention", "EWiseAdd", "GELU"}
    assert len(seen) > 40


class Split(nn.Module):
    def __init__(self, places):
        super().__init__()
        self.weight, self.places = nn.Parameter(np.random.RandomState(2).randn(6, W).astype("float32")), places

    def forward(self, x):
        total = 0.0
        for i, place in enumerate(self.places):
            total = total + (ops.sin(x[0, :1, :1] * (i + 1)) * self.weight[place]).sum() * (i + 1)
        return total


# by name: which parts of a (6, W) weight are read, and whether their gradients are joined
PARTS = {
    "halves": ((slice(0, 3), slice(3, 6)), True),
    "three, out of order": ((slice(4, None), slice(0, 1), slice(1, -2)), True),
    "columns": (((slice(0, 6), slice(0, 5)), (slice(0, 6), slice(5, None))), True),
    "a gap": ((slice(0, 3), slice(4, 6)), False),
    "not to the end": ((slice(0, 3), slice(3, 5)), False),
    "twice": ((slice(0, 3), slice(3, 6), slice(0, 3)), False),
    "overlapping": ((slice(0, 4), slice(3, 6)), False),
    "two axes": ((slice(0, 3), (slice(3, 6), slice(0, 6))), False),
    "numbers": ((slice(1, 6), 0), False),
    "every second": ((slice(0, 6, 2), slice(1, 6, 2)), False),
    "halves and the whole": ((slice(0, 3), slice(3, 6), slice(None, None)), False),
}


@pytest.mark.parametrize("name", PARTS)
def test_gradients_of_a_split_weight_are_joined(name):
    places, is_joined = PARTS[name]
    net = Split(places)
    other, x = copy.deepcopy(net), np.random.RandomState(3).randn(N, L, W).astype("float32")
    optimizers = [ndl.optim.SGD(n.parameters(), 0.1, momentum=0.9) for n in (net, other)]
    loss = lambda out, y: out * y.sum()  # noqa: E731
    y = np.ones(2, "float32")
    step = ndl.compile_step(net, loss, optimizers[0], (x, y))
    for _ in range(2):
        assert float(step(x, y)) == pytest.approx(eager_step(other, loss, optimizers[1], x, y), rel=1e-5)
    assert_same(net, other)
    kernels = [kernel for kernel, label, _ in step.profile(x, y, rounds=1) if label.startswith("scatter")]
    assert ("fill" not in kernels) == is_joined
