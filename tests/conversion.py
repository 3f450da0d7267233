"""What every conversion sample goes through: values in both modes, gradients, another batch size, and the compiled form."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

import needle as ndl
import torch2needle
from gpu_devices import compiles, ours
from torch2needle.models import randomize

TOLERANCE = 1e-5  # relative to the largest value


class Calls(nn.Module):
    """A module around a function of the inputs; `children` are handed to the function after them."""

    def __init__(self, f: Callable, *children: nn.Module) -> None:
        super().__init__()
        self.f = f
        self.parts = nn.ModuleList(children)

    def forward(self, x: torch.Tensor) -> Any:
        return self.f(x, *self.parts)


def leaves(value: Any) -> list[Any]:
    """The tensors of a nested result, in order."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, tuple | list):
        return [x for v in value for x in leaves(v)]
    return [value] if hasattr(value, "shape") else []


def close(ours: Any, theirs: Any, tolerance: float = TOLERANCE) -> None:
    """Nested results, or single tensors of any two libraries, are equal within the tolerance."""
    got, want = leaves(ours), leaves(theirs)
    assert len(got) == len(want)
    for g, w in zip(got, want, strict=True):
        g, w = (np.asarray(t.detach().numpy()) for t in (g, w))
        assert g.shape == w.shape
        if w.size:
            scale = max(1e-30, np.abs(np.where(np.isfinite(w), w, 0)).max())
            np.testing.assert_allclose(g, w, rtol=0, atol=tolerance * scale)


def draw(shapes: Any) -> tuple[torch.Tensor, ...]:
    """Inputs for shapes; a ready tensor stands for itself."""
    return tuple(torch.randn(s) if isinstance(s, tuple) else s.clone() for s in shapes)


def placed(inputs: tuple[torch.Tensor, ...]) -> tuple[Any, ...]:
    """The inputs on the default device, as torch's where that is the CPU."""
    return inputs if ndl.default_device() in (ndl.cpu(), ndl.cpu_numpy()) else tuple(map(ours, inputs))


def wider(shapes: Any) -> list[Any]:
    """The same inputs with one more in the batch."""
    return [(s[0] + 1, *s[1:]) if isinstance(s, tuple) else torch.cat([s, s[:1]]) for s in shapes]


def gradients_agree(model: nn.Module, net: ndl.nn.Module, inputs: tuple[torch.Tensor, ...], tolerance: float) -> None:
    """Gradients of inputs and parameters of a weighted sum of every output, against torch."""
    net.reset_grad()  # gradients add up, as the twin's
    theirs_in = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
    ours_in = [ndl.Tensor(x.numpy(), dtype=str(x.dtype)[6:], requires_grad=x.is_floating_point()) for x in inputs]
    outs = [o for o in leaves(model(*(x.clone() if x.requires_grad else x for x in theirs_in))) if o.requires_grad]
    if not outs:
        return
    got = [o for o in leaves(net(*ours_in)) if o.requires_grad]
    weights = [torch.randn(o.shape) for o in outs]
    torch.stack([(o * w).sum() for o, w in zip(outs, weights, strict=True)]).sum().backward()
    total: Any = 0
    for o, w in zip(got, weights, strict=True):
        total = ndl.ops.summation(o * ndl.Tensor(w.numpy(), requires_grad=False)) + total
    total.backward()
    pairs = list(zip(ours_in, theirs_in, strict=True))
    own = dict(net.named_parameters())
    pairs += [(own[k], p) for k, p in model.named_parameters() if k in own]
    for mine, theirs in pairs:
        if theirs.grad is not None:
            assert mine.grad is not None
            close(mine.grad, theirs.grad.to_dense(), tolerance)


def saved_and_loaded(net: ndl.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
    """What `save` accepts, `load` takes, and it gives the same."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/net"
        try:
            ndl.save(net, path)
        except ValueError as e:
            assert str(e).startswith("[save] ")
            return
        again = ndl.load(path)
        np.random.seed(0)
        want = net(*placed(draw(inputs)))
        np.random.seed(0)
        close(again(*placed(draw(inputs))), want, 0)


def converts(
    model: nn.Module,
    *shapes: Any,
    example: bool = False,
    gradient: bool = True,
    batch: bool = True,
    executable: bool = True,
    modes: tuple[bool, ...] = (False, True),
    tolerance: float = TOLERANCE,
) -> Any:
    """Convert `model` and hold it against torch: `shapes` are input shapes or ready tensors.

    modes: training flags to compare in; batch: also one more in the batch; gradient: of inputs and parameters;
    executable: compiled in evaluation. Layers that draw random numbers are compared in evaluation only.
    """
    torch.manual_seed(0)
    inputs = draw(shapes)
    randomize(model)
    net = torch2needle.convert(model, tuple(inputs) if example else None)
    assert list(net.state_dict()) == list(model.state_dict())
    for mode in sorted(modes, reverse=True):
        model.train(mode), net.train(mode)
        close(net(*placed(draw(inputs))), model(*draw(inputs)), tolerance)
        for key, value in model.state_dict().items():
            close(net.state_dict()[key], value, tolerance)
        if gradient:
            twin = copy.deepcopy(model)
            gradients_agree(twin, net, inputs, 10 * tolerance)
            model.load_state_dict(twin.state_dict())
    if False in modes:
        with torch.no_grad():
            if batch:
                more = draw(wider(shapes))
                close(net(*placed(draw(more))), model(*draw(more)), tolerance)
            saved_and_loaded(net, inputs)
            if executable and compiles():
                close(ndl.compile(net, placed(inputs))(*placed(draw(inputs))), model(*draw(inputs)), tolerance)
    return net
