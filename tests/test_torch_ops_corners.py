"""torch.ops.needle.* in its corners: weights that change behind its back, drawn shapes, transforms, threads, algorithms."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from test_torch_ops import LAST, NEEDLE, UNFUSED, close, r, torch_ops, variance


def changed(w: torch.nn.Parameter, how: str) -> None:
    """The weights get other numbers, in one of the ways in which that happens; some tell torch nothing of it."""
    new = r(*w.shape)
    if how == "in place":
        with torch.no_grad():
            w.copy_(new)
    elif how == ".data in place":
        w.data.copy_(new)
    elif how == ".data":
        w.data = new
    elif how == "numpy":
        w.detach().numpy()[...] = new.numpy()
    elif how == "optimizer":
        w.grad = new
        torch.optim.SGD([w], lr=0.5).step()
        w.grad = None
    elif how == "state_dict":
        module = torch.nn.ParameterDict({"w": w})
        module.load_state_dict({"w": new})
    elif how == "storage":
        w.untyped_storage().copy_(new.contiguous().untyped_storage())


HOW = ("in place", ".data in place", ".data", "numpy", "optimizer", "state_dict", "storage")


@pytest.mark.parametrize("how", HOW)
def test_sees_every_change_of_weights(how: str) -> None:
    """Nothing is kept of weights between calls: a version number would not tell of all of these."""
    ops: list[tuple[Callable, tuple[int, ...], tuple[int, ...]]] = [
        (NEEDLE.linear_bias_act, (20, 40), (24, 40)),
        (NEEDLE.linear_bias_act, (2, 40), (24, 40)),
        (NEEDLE.conv2d_bias_act, (2, 32, 12, 12), (32, 32, 3, 3)),
        (NEEDLE.conv2d_bias_act, (1, 3, 12, 12), (8, 3, 5, 5)),
        (NEEDLE.conv_transpose2d_bias_act, (1, 16, 5, 5), (16, 8, 2, 2)),
    ]
    for op, of_x, of_w in ops:
        x, w = r(*of_x), torch.nn.Parameter(r(*of_w))
        for _ in range(3):
            with torch.no_grad():
                close(op(x, w), op(x.double(), w.double()))
            changed(w, how)


def test_memory_that_another_weight_had() -> None:
    x = r(20, 64)
    for _ in range(20):
        w = r(64, 64)
        close(NEEDLE.linear_relu(x, w), UNFUSED.linear_bias_act(x.double(), w.double()))
        del w


# ---- drawn shapes ----------------------------------------------------------------------------------------------------


def laid_out(draw: random.Random, x: torch.Tensor) -> torch.Tensor:
    """The same numbers in another layout."""
    how = draw.choice(["as it is", "channels last", "slice", "swapped"])
    if how == "channels last" and x.ndim == 4:
        return x.contiguous(**LAST)
    if how == "slice":
        return torch.stack([x, x], -1)[..., 0]
    if how == "swapped" and x.ndim > 1:
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    return x


def size(draw: random.Random, most: int) -> int:
    return draw.choice([1, 2, 3, draw.randint(1, most)])


def linear_case(draw: random.Random) -> tuple[str, list[Any]]:
    k, n = size(draw, 90), size(draw, 90)
    leading = draw.choice([(), (size(draw, 40),), (size(draw, 4), size(draw, 9))])
    return "linear_bias_act", [r(*leading, k), r(n, k), draw.choice([None, r(n)])]


def conv_case(draw: random.Random) -> tuple[str, list[Any]]:
    op = draw.choice(["conv2d_bias_act", "conv2d_bn_act", "conv_transpose2d_bias_act"])
    kind = draw.choice(["plain", "3x3", "groups", "depthwise", "1x1"])
    groups = size(draw, 20) if kind in ("groups", "depthwise") else 1
    per_in, per_out = (1, 1) if kind == "depthwise" else (size(draw, 40), size(draw, 40))
    kernel = {"3x3": (3, 3), "1x1": (1, 1)}.get(kind) or (draw.randint(1, 4), draw.randint(1, 4))
    stride, dilation = (
        [1, 1] if kind == "3x3" or draw.random() < 0.4 else [draw.randint(1, 3) for _ in range(2)] for _ in range(2)
    )
    padding = [draw.randint(0, k - 1) for k in kernel]
    image = [max(size(draw, 20), (k - 1) * d + 1 - 2 * p) for k, d, p in zip(kernel, dilation, padding, strict=True)]
    x, channels = r(size(draw, 4), per_in * groups, *image), per_out * groups
    conv = [stride, padding, dilation, groups]
    if op == "conv_transpose2d_bias_act":
        padding = [min(p, d * (k - 1) // 2) for p, d, k in zip(padding, dilation, kernel, strict=True)]
        more = [draw.randint(0, max(s, d) - 1) for s, d in zip(stride, dilation, strict=True)]
        w = r(per_in * groups, per_out, *kernel)
        return op, [x, w, draw.choice([None, r(channels)]), stride, padding, more, groups, dilation]
    w, bias = r(channels, per_in, *kernel), draw.choice([None, r(channels)])
    if op == "conv2d_bias_act":
        return op, [x, w, bias, *conv]
    affine = [draw.choice([None, r(channels)]) for _ in range(2)]
    return op, [x, w, bias, r(channels), variance(channels), *affine, *conv, 1e-3]


def attention_case(draw: random.Random) -> tuple[str, list[Any]]:
    heads = draw.choice([(), (size(draw, 3),), (size(draw, 3), size(draw, 3))])
    length, keys, e, d = (size(draw, 40) for _ in range(4))
    mask = draw.choice([None, r(length, keys), torch.rand(keys) < 0.7])
    if mask is not None and mask.dtype == torch.bool:
        mask[0] = True  # torch gives NaN where a query sees no key
    return "attention", [r(*heads, length, e), r(*heads, keys, e), r(*heads, keys, d), mask, draw.random() < 0.4]


@pytest.mark.parametrize("seed", range(int(os.environ.get("NEEDLE_DRAWN", "120"))))
def test_drawn(seed: int) -> None:
    """Values and gradients of drawn calls in drawn layouts against float64; a drawn part of the operands needs gradients."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    op, arguments = draw.choice([linear_case, conv_case, conv_case, attention_case])(draw)
    names = [a.name for a in getattr(NEEDLE, op).default._schema.arguments]
    arguments = [laid_out(draw, a) if isinstance(a, torch.Tensor) else a for a in arguments]
    needed = [
        isinstance(a, torch.Tensor) and a.is_floating_point() and not n.startswith("running") and draw.random() < 0.7
        for a, n in zip(arguments, names, strict=False)
    ]
    slope = None

    def run(form: Callable, dtype: torch.dtype) -> list[torch.Tensor]:
        nonlocal slope
        given = [
            a.detach().to(dtype) if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in arguments
        ]
        given = [
            a.requires_grad_(n) if isinstance(a, torch.Tensor) and n else a for a, n in zip(given, needed, strict=True)
        ]
        rest = {} if op == "attention" else {"activation": activation}
        y = form(*given, **rest)
        found = [y.detach()]
        if any(needed):
            slope = (
                laid_out(draw, r(*y.shape)) if slope is None else slope.contiguous()
            )  # in others torch may misread it
            found += torch.autograd.grad(y, [a for a, n in zip(given, needed, strict=True) if n], slope.to(dtype))
        return found

    activation = draw.choice(["none", "none", "sigmoid", "relu"])
    got, exact = run(getattr(NEEDLE, op), torch.float32), run(getattr(UNFUSED, op), torch.float64)
    single = run(getattr(UNFUSED, op), torch.float32)
    for g, e, s in zip(got, exact, single, strict=True):
        if activation == "relu" and (g - e).abs().max() > 1e-3:
            continue  # a result near zero on the other side of the kink, which torch's rounding decides as well
        close(g, e, s)


# ---- transforms, threads, algorithms ---------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
def test_derivatives_of_derivatives(causal: bool) -> None:
    """Of attention in torch's operations, where torch's own has none."""
    q, k, v = (r(2, 2, 4, 3).requires_grad_() for _ in range(3))
    y = NEEDLE.attention(q, k, v, None, causal).square().sum()
    plain = torch.autograd.grad(y, (q, k, v), retain_graph=True)
    graph = torch.autograd.grad(y, (q, k, v), create_graph=True)
    for a, b in zip(plain, graph, strict=True):
        close(a, b.detach().double())
    second = torch.autograd.grad(sum(g.square().sum() for g in graph), (q, k, v))

    def squares(at: torch.Tensor) -> torch.Tensor:
        """Of the first derivatives."""
        leaves = [t.detach().requires_grad_() for t in (at, k, v)]
        y = NEEDLE.attention(*leaves, None, causal).square().sum()
        return sum(g.double().square().sum() for g in torch.autograd.grad(y, leaves))

    step = 1e-3 * torch.ones_like(q)
    slope = (squares(q.detach() + step) - squares(q.detach() - step)) / 2e-3
    assert abs(float(slope - second[0].sum())) < 1e-2 * max(1.0, float(second[0].abs().sum()))


@pytest.mark.parametrize("op", ["linear", "conv"])
def test_batched_gradients(op: str) -> None:
    """Jacobians by vmap over the backward."""
    w = r(5, 6) if op == "linear" else r(5, 3, 3, 3)
    x = (r(3, 6) if op == "linear" else r(1, 3, 4, 4)).requires_grad_()
    f = (lambda t: NEEDLE.linear_relu(t, w)) if op == "linear" else (lambda t: NEEDLE.conv2d_bias_relu(t, w))
    y = f(x)
    grads = torch.eye(y.numel()).reshape(-1, *y.shape)
    (batched,) = torch.autograd.grad(y, x, grads, is_grads_batched=True, retain_graph=True)
    single = torch.stack([torch.autograd.grad(y, x, g, retain_graph=True)[0] for g in grads])
    assert torch.allclose(batched, single, atol=1e-5)


def test_threads_of_python() -> None:
    """Calls from several threads at once give what they give alone."""
    x, w = r(2, 32, 16, 16), r(32, 32, 3, 3)

    def step(scale: float) -> list[torch.Tensor]:
        leaves = [(x * scale).requires_grad_(), (w * scale).requires_grad_()]
        y = NEEDLE.conv2d_bias_relu(*leaves, None, 1, 1)
        return [y.detach(), *torch.autograd.grad(y.sum(), leaves)]

    expected = [step(1.0 + i) for i in range(4)]
    wrong: list[int] = []

    def work(i: int) -> None:
        for _ in range(10):
            found = step(1.0 + i)
            if not all(torch.allclose(f, e, rtol=1e-5, atol=1e-4) for f, e in zip(found, expected[i], strict=True)):
                wrong.append(i)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in workers:
        t.start()
    for t in workers:
        t.join()
    assert not wrong


def test_winograd_can_be_switched_off() -> None:
    x, w = r(1, 64, 28, 28), r(64, 64, 3, 3)
    exact = UNFUSED.conv2d_bias_act(x.double(), w.double())
    found = {}
    try:
        for setting in torch_ops.WINOGRAD:
            torch_ops.set_winograd(setting)
            found[setting] = NEEDLE.conv2d_bias_act(x, w)
            close(found[setting], exact)
    finally:
        torch_ops.set_winograd("auto")
    errors = {k: float((v - exact).abs().max()) for k, v in found.items()}
    assert errors["f2"] < errors["auto"] and errors["off"] < errors["auto"]
    with pytest.raises(ValueError, match=r'\[set_winograd\] expected "auto", "f2" or "off", got .*\.'):
        torch_ops.set_winograd("f4")


def test_gradient_in_another_layout() -> None:
    """torch's own backward of a batch norm misreads this one."""
    x, g = r(1, 7, 1, 5), r(1, 7, 1, 5)
    statistics = (r(7), variance(7))
    found = []
    for grad in (g, g.transpose(0, -1).contiguous().transpose(0, -1)):
        leaf = x.clone().requires_grad_()
        found.append(torch.autograd.grad(NEEDLE.batch_norm_relu(leaf, *statistics), leaf, grad)[0])
    assert torch.equal(*found)
