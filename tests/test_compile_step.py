"""`needle.compile_step` beside eager steps: nets, optimizers and options drawn at random, state, and what is refused."""

import copy

import numpy as np
import pytest

import needle as ndl
from needle import nn, optim

ce = ndl.ops.cross_entropy


def batch(seed, *shape, classes=5):
    draw = np.random.RandomState(seed)
    return draw.randn(*shape).astype("float32"), draw.randint(0, classes, shape[0])


def mlp():
    return nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 5))


def eager_step(net, loss, opt, x, y, clip=None, value=None):
    opt.reset_grad()
    out = loss(
        net(ndl.Tensor(x, dtype=str(x.dtype), requires_grad=False)),
        ndl.Tensor(y, dtype=str(y.dtype), requires_grad=False),
    )
    out.backward()
    if clip is not None:
        opt.clip_grad_norm(clip)
    if value is not None:
        optim.clip_grad_value(opt.params, value)
    opt.step()
    return out.item()


def first(net):
    return next(m for _, m in net.named_modules() if hasattr(m, "weight"))


def assert_same(net, other, tolerance=2e-5):
    for (name, a), (_, b) in zip(net.named_tensors(), other.named_tensors(), strict=True):
        a, b = a.numpy(), b.numpy()
        np.testing.assert_allclose(b, a, rtol=0, atol=tolerance * max(1.0, np.abs(a).max()), err_msg=name)


# -- nets drawn at random ------------------------------------------------------------------------------------------------

NORMS = {"image": (nn.BatchNorm2d, lambda c: nn.GroupNorm(1, c)), "rows": (nn.BatchNorm1d, nn.LayerNorm)}
ACTIVATIONS = (nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.LeakyReLU, nn.Hardswish, nn.Sigmoid)
OPTIMIZERS = (
    lambda p: optim.SGD(p, 0.05, momentum=0.9),
    lambda p: optim.SGD(p, 0.05, momentum=0.9, nesterov=True, weight_decay=0.01, rule="torch"),
    lambda p: optim.SGD(p, 0.05, maximize=True, rule="torch"),
    lambda p: optim.Adam(p, 0.01, eps=0.01),
    lambda p: optim.Adam(p, 0.01, eps=0.01, amsgrad=True, weight_decay=0.1, rule="torch"),
    lambda p: optim.AdamW(p, 0.01, eps=0.01, rule="torch"),
    lambda p: optim.RMSprop(p, 0.01, eps=0.1, momentum=0.9, centered=True),
    lambda p: optim.SGD([{"params": p[:1], "lr": 0.1}, {"params": p[1:]}], lr=0.01, momentum=0.5, rule="torch"),
)


def conv(*args, **kwargs):
    return nn.Conv(*args, layout="torch", **kwargs)


class Residual(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.inner = nn.Sequential(*layers)

    def forward(self, x):
        return x + self.inner(x)


class Tied(nn.Module):
    """An embedding whose table is the last layer's weight, and attention in between."""

    def __init__(self, words, width):
        super().__init__()
        self.table = nn.Embedding(words, width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)

    def forward(self, x):
        h = self.table(x)
        h = h + self.attention(h, h, h)[0]
        return h.mean(1) @ self.table.weight.transpose(0, 1)


def images(draw):
    pick = lambda *options: options[draw.randint(len(options))]  # noqa: E731
    channels, layers = pick(1, 3, 5), []
    size, inputs = int(draw.randint(5, 12)), channels
    for _ in range(draw.randint(1, 4)):
        out = int(pick(4, 16, 17, 32))
        groups = int(pick(1, 1, 1, np.gcd(channels, out)))
        kernel, stride = int(pick(1, 3, 3, 5)), int(pick(1, 1, 2))
        dilation = int(pick(1, 1, 2)) if kernel == 3 else 1
        bias = bool(pick(0, 1))
        layers.append(
            conv(
                channels,
                out,
                kernel,
                stride,
                padding=kernel // 2 * dilation,
                dilation=dilation,
                groups=groups,
                bias=bias,
            )
            if draw.rand() < 0.8
            else nn.ConvTranspose2d(channels, out, kernel, stride, kernel // 2, groups=groups, bias=bias)
        )
        channels = out
        layers += [make(channels) for make in NORMS["image"] if draw.rand() < 0.4]
        layers += [pick(*ACTIVATIONS)()]
        if draw.rand() < 0.3:
            layers.append(Residual(conv(out, out, 3, padding=1), pick(*ACTIVATIONS)()))
        if draw.rand() < 0.2:
            layers.append(nn.Dropout(0.2))
    pooled = pick((1, 1), (1, 1), (2, 1))
    layers += [nn.AdaptiveAvgPool2d(pooled), nn.Flatten()]
    if draw.rand() < 0.4:
        layers.insert(2, pick(nn.MaxPool2d(2, 1), nn.AvgPool2d(2, 1), nn.Upsample(scale_factor=2)))
    net = nn.Sequential(*layers, nn.Linear(channels * pooled[0], 5))
    return net, batch(draw.randint(99), int(draw.randint(2, 5)), inputs, size, size)


def rows(draw):
    layers, width = [], 6
    for _ in range(draw.randint(1, 4)):
        out = int(draw.randint(1, 20))
        layers += [nn.Linear(width, out), ACTIVATIONS[draw.randint(len(ACTIVATIONS))]()]
        layers += [make(out) for make in NORMS["rows"] if draw.rand() < 0.3 and out > 1]
        layers += [nn.Dropout(0.5)] if draw.rand() < 0.3 else []
        width = out
    return nn.Sequential(*layers, nn.Linear(width, 5)), batch(draw.randint(99), int(draw.randint(2, 9)), 6)


def words(draw):
    return Tied(5, 8), (draw.randint(0, 5, (3, 4)), draw.randint(0, 5, 3))


def sequences(draw):
    cell = (nn.LSTM, nn.GRU, nn.RNN)[draw.randint(3)]

    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.out = cell(3, 6, num_layers=2), nn.Linear(6, 5)

        def forward(self, x):
            return self.out(self.cell(x)[0][-1])

    x = draw.randn(5, 4, 3).astype("float32")
    return Last(), (x, draw.randint(0, 5, 4))


KINDS = (images, images, images, rows, words, sequences)


@pytest.mark.parametrize("seed", range(60))
def test_steps_equal_eager_ones(seed):
    draw = np.random.RandomState(seed)
    np.random.seed(seed)
    net, (x, y) = KINDS[seed % len(KINDS)](draw)
    options = {}
    if draw.rand() < 0.3:
        options["clip_grad_norm"] = float(draw.choice([0.01, 1.0, 100.0]))
    if draw.rand() < 0.2:
        options["clip_grad_value"] = 0.05
    if draw.rand() < 0.3:
        for p in list(net.parameters())[:: draw.randint(2, 4)]:
            p.requires_grad = False
    other = copy.deepcopy(net)
    make = OPTIMIZERS[draw.randint(len(OPTIMIZERS))]
    opt, planned = make(list(net.parameters())), make(list(other.parameters()))
    assert any(p.requires_grad for p in net.parameters())
    np.random.seed(1)
    losses = [
        eager_step(net, ce, opt, x, y, *(options.get(f"clip_grad_{k}") for k in ("norm", "value"))) for _ in range(5)
    ]
    np.random.seed(1)
    frugal = copy.deepcopy(other)
    step = ndl.compile_step(other, ce, planned, (x, y), **options)
    found = [float(step(x, y)) for _ in range(5)]
    np.testing.assert_allclose(found, losses, rtol=2e-4, atol=1e-5)
    assert_same(net, other, 5e-4)
    assert planned.t == opt.t and len(planned.state) == len(opt.state)
    np.random.seed(1)
    step = ndl.compile_step(frugal, ce, make(list(frugal.parameters())), (x, y), recompute="full", **options)
    assert [float(step(x, y)) for _ in range(5)] == found
    assert_same(other, frugal, 0)


# -- state ---------------------------------------------------------------------------------------------------------------


def pair(opt=lambda p: optim.SGD(p, 0.1, momentum=0.9), make=mlp):
    """A net with its optimizer and a copy of both."""
    net = make()
    other = copy.deepcopy(net)
    return net, opt(list(net.parameters())), other, opt(list(other.parameters()))


def test_eager_calls_executables_and_state_dicts_see_what_a_step_trained():
    x, y = batch(0, 8, 12)
    net = nn.Sequential(nn.Linear(12, 5))
    exe = ndl.compile(net.eval(), x)
    step = ndl.compile_step(net.train(), ce, optim.Adam(net.parameters(), 0.1), (x, y))
    before = exe(x)
    for _ in range(3):
        step(x, y)
        now = exe(x)
        assert np.abs(now - before).max() > 1e-3
        np.testing.assert_allclose(now, net(ndl.Tensor(x)).numpy(), atol=1e-6)
        np.testing.assert_array_equal(next(iter(net.state_dict().values())), first(net).weight.numpy())
        before = now


def test_eager_steps_and_loaded_state_in_between():
    x, y = batch(0, 8, 12)
    net, opt, other, planned = pair(lambda p: optim.Adam(p, 0.01))
    step = ndl.compile_step(other, ce, planned, (x, y))
    np.random.seed(0)
    losses = [eager_step(net, ce, opt, x, y) for _ in range(6)]
    np.random.seed(0)
    found = [float(step(x, y)), float(step(x, y)), eager_step(other, ce, planned, x, y), float(step(x, y))]
    saved, weights = planned.state_dict(), {k: np.array(v) for k, v in other.state_dict().items()}
    stream = np.random.get_state()
    found += [float(step(x, y)), float(step(x, y))]
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    planned.load_state_dict(saved)
    other.load_state_dict(weights)
    np.random.set_state(stream)
    np.testing.assert_allclose([float(step(x, y)), float(step(x, y))], losses[4:], rtol=1e-5)
    assert_same(net, other)


def test_options_of_the_optimizer_hold_from_the_next_step_on():
    x, y = batch(0, 8, 12)
    net, opt, other, planned = pair(lambda p: optim.SGD(p, 0.1))
    step = ndl.compile_step(other, ce, planned, (x, y))
    for i in range(5):
        opt.lr = planned.lr = 0.1 / (i + 1)
        if i == 3:
            opt.momentum = planned.momentum = 0.9  # one more array of state
        np.random.seed(i)
        loss = eager_step(net, ce, opt, x, y)
        np.random.seed(i)
        np.testing.assert_allclose(float(step(x, y)), loss, rtol=1e-5)
    assert_same(net, other)


def test_parameters_that_stop_needing_a_gradient_stay():
    x, y = batch(0, 8, 12)
    net, opt, other, planned = pair()
    step = ndl.compile_step(other, ce, planned, (x, y))
    for frozen in (False, True, False):
        for n in (net, other):
            first(n).weight.requires_grad = not frozen
        before = first(other).weight.numpy()
        np.random.seed(0)
        loss = eager_step(net, ce, opt, x, y)
        np.random.seed(0)
        np.testing.assert_allclose(float(step(x, y)), loss, rtol=1e-5)
        assert np.array_equal(before, first(other).weight.numpy()) == frozen
    assert_same(net, other)


def test_modes_and_batches_of_other_sizes():
    net, opt, other, planned = pair()
    step = ndl.compile_step(other, ce, planned, batch(0, 8, 12))
    for size, training in ((8, True), (3, True), (8, False), (5, True), (8, True)):
        x, y = batch(size, size, 12)
        net.train(training), other.train(training)
        np.random.seed(0)
        loss = eager_step(net, ce, opt, x, y)
        np.random.seed(0)
        np.testing.assert_allclose(float(step(x, y)), loss, rtol=1e-5)
    assert_same(net, other)


@pytest.mark.parametrize("accumulate", [2, 3])
def test_accumulated_steps(accumulate):
    net, opt, other, planned = pair(lambda p: optim.Adam(p, 0.01))
    step = ndl.compile_step(other, ce, planned, batch(0, 8, 12), accumulate=accumulate, clip_grad_norm=0.5)
    opt.reset_grad()
    for i in range(2 * accumulate + 1):
        x, y = batch(i, 8, 12)
        np.random.seed(i)
        loss = ce(net(ndl.Tensor(x, requires_grad=False)), y)
        (loss * (1 / accumulate)).backward()
        if (i + 1) % accumulate == 0:
            opt.clip_grad_norm(0.5)
            opt.step()
            opt.reset_grad()
        np.random.seed(i)
        np.testing.assert_allclose(float(step(x, y)), loss.item(), rtol=1e-5)
        assert_same(net, other)


def test_equal_runs_are_equal_to_the_bit_and_profiles_train_nothing():
    found = []
    for profiled in (False, True):
        np.random.seed(0)
        net = mlp()
        x, y = batch(0, 8, 12)
        step = ndl.compile_step(net, ce, optim.Adam(net.parameters(), 0.01), (x, y))
        losses = [step(x, y).tobytes() for _ in range(3)]
        if profiled:
            stream = np.random.get_state()
            rows = step.profile(x, y, rounds=2)
            np.random.set_state(stream)
            assert len(rows) == len(step.plan.names) and all(t >= 0 for *_, t in rows)
        found.append([*losses, *(step(x, y).tobytes() for _ in range(2))])
    assert found[0] == found[1]


def test_inputs_by_name_structures_and_kinds_of_arrays():
    torch = pytest.importorskip("torch")

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(12, 5), nn.Linear(12, 5)

        def forward(self, x, other):
            return self.a(x), self.b(other)

    net = Two()
    x, y = batch(0, 8, 12)

    def loss(out, y):
        first, second = ce(out[0], y["labels"]), ce(out[1], y["labels"])
        return {"loss": first + y["weight"] * second, "parts": (first, second)}

    step = ndl.compile_step(
        net, loss, optim.SGD(net.parameters(), 0.1), ({"x": x, "other": x}, {"labels": y, "weight": 0.5})
    )
    made = step({"x": x, "other": x}, {"labels": y, "weight": 0.5})
    assert isinstance(made["loss"], np.ndarray)
    np.testing.assert_allclose(made["loss"], made["parts"][0] + 0.5 * made["parts"][1], rtol=1e-6)
    given = torch.from_numpy(x)
    rows = step.profile({"other": x, "x": x}, {"labels": y, "weight": 0.5}, rounds=1)
    assert [label for _, label, _ in rows] == step.plan.labels
    again = step((given, given), {"labels": torch.from_numpy(y), "weight": 0.5})
    assert isinstance(again["loss"], torch.Tensor) and float(again["loss"]) < float(made["loss"])


# -- what is refused -----------------------------------------------------------------------------------------------------


def test_bad_arguments_are_one_sentence():
    x, y = batch(0, 8, 12)
    net = mlp()
    opt = optim.SGD(net.parameters(), 0.1)
    bad = (
        ((mlp, ce, opt, (x, y)), {}, TypeError, "net expects a needle Module"),
        ((net, nn.SoftmaxLoss, opt, (x, y)), {}, TypeError, "loss expects a function"),
        ((net, ce, None, (x, y)), {}, TypeError, "optimizer expects one of needle.optim"),
        ((net, ce, opt, x), {}, TypeError, "expects a tuple"),
        (
            (net, ce, optim.SGD(mlp().parameters(), 0.1), (x, y)),
            {},
            ValueError,
            "expects parameters of the model, got 6 that",
        ),
        ((net, lambda a, b: a, opt, (x, y)), {}, ValueError, "expects to be one float, got float32"),
        ((net, lambda a, b: 1.0, opt, (x, y)), {}, TypeError, "expects to return a tensor"),
        ((net, lambda a, b: a.detach().sum(), opt, (x, y)), {}, ValueError, "depend on parameters"),
        ((net, ce, opt, (x, y)), {"accumulate": 0}, ValueError, "accumulate expects"),
        ((net, ce, opt, (x, y)), {"clip_grad_norm": -1}, ValueError, "clip_grad_norm expects"),
        ((net, ce, opt, (x, y)), {"winograd": "no"}, ValueError, "winograd expects"),
        (
            (net, ce, opt, (x, y)),
            {"recompute": True},
            ValueError,
            "recompute expects one of auto, none, full, got True",
        ),
        ((net, ce, opt, (x[:, :3], y)), {}, ValueError, "linear"),
    )
    for args, options, error, text in bad:
        with pytest.raises(error, match=text):
            ndl.compile_step(*args, **options)


def test_a_call_that_fails_leaves_everything_as_it_was():
    x, y = batch(0, 8, 12)
    net = nn.Sequential(nn.Linear(12, 5), nn.BatchNorm1d(5))
    opt = optim.Adam(net.parameters(), 0.1)
    step = ndl.compile_step(net, ce, opt, (x, y))
    step(x, y)
    before = {n: t.numpy() for n, t in net.named_tensors()}
    for bad, error in (((x, y + 9), IndexError), ((x[:, :5], y), ValueError), ((x, y[:4]), ValueError)):
        with pytest.raises(error):
            step(*bad)
    assert opt.t == 1 and all(s["step"] == 1 for s in opt.state.values())
    assert all(np.array_equal(before[n], t.numpy()) for n, t in net.named_tensors())
    step(x, y)
    assert opt.t == 2


def test_detect_anomaly_names_the_first_op():
    x, y = batch(0, 8, 12)
    net = nn.Sequential(nn.Linear(12, 5))
    step = ndl.compile_step(
        net, lambda out, y: ndl.ops.log(out).mean(), optim.SGD(net.parameters(), 0.1), (x, y), detect_anomaly=True
    )
    before = first(net).weight.numpy()
    with pytest.raises(FloatingPointError, match=r"log .* makes NaN of numbers; nothing was updated"):
        step(x, y)
    np.testing.assert_array_equal(before, first(net).weight.numpy())


def test_losses_are_told_what_has_no_gradient():
    class Heads(nn.Module):
        def __init__(self):
            self.linear, self.head = nn.Linear(12, 5), nn.Linear(5, 5)

        def forward(self, x):
            y = self.linear(x)
            apart = ndl.ops.stop_gradient(y)
            return self.head(y), apart, self.head(apart), ndl.ops.argmax(y, axis=1), x * 2

    (x, _), seen = batch(0, 8, 12), []

    def loss(out, y):
        seen.append([t.requires_grad for t in out])
        return sum(ndl.ops.mean(t * t) for t in out if t.requires_grad)

    net = Heads()
    loss(net(ndl.Tensor(x, requires_grad=False)), None)
    step = ndl.compile_step(net, loss, optim.SGD(net.parameters(), 0.1), (x, x))
    step(x, x)
    assert seen[0] == [True, False, True, False, False] and all(s == seen[0] for s in seen)
