"""Inputs and buffers of fewer than 32 bits: equal to torch where their values are moved, compared or cast, else refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import needle as ndl
import torch2needle
from needle.graph import narrow
from needle.op import OPS

DTYPES = (torch.uint8, torch.int8, torch.int16)
TAKEN = {  # one input
    "float": lambda x: x.float() / 255,
    "divided": lambda x: x / 2,
    "times a float": lambda x: x * 0.5,
    "int32": lambda x: x.int() * 1000,
    "sum": lambda x: x.sum(-1),
    "cumsum": lambda x: x.cumsum(-1),
    "compared": lambda x: x > 5,
    "moved": lambda x: x.flip(-1).reshape(3, 1).squeeze(-1)[:2],
    "joined with int64": lambda x: torch.cat([x, x.long() * 300], -1),
    "chosen": lambda x: torch.where(x > 5, x, 0),
    "max": lambda x: x.amax(-1),
    "bits of few": lambda x: (x >> 2) & 15 | 3,
}
REFUSED = {
    "add": lambda x: x + x,
    "negative": lambda x: -x,
    "less a number": lambda x: x - 101,
    "cast too late": lambda x: (x * x).float(),
    "bits": lambda x: ~x,
    "bits beyond": lambda x: x & 70000,
    "shifted up": lambda x: x << 2,
    "product": lambda x: x @ x.T,
    "compared with what it cannot be": lambda x: x > 70000,
}


class Forward(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


class OfOne(Forward):
    def forward(self, x):
        return self.function(x)


class OfTwo(Forward):
    def forward(self, x, y):
        return self.function(x, y)


class WithBuffer(Forward):
    def __init__(self, function):
        super().__init__(function)
        self.register_buffer("table", torch.tensor([200, 100, 3], dtype=torch.uint8))

    def forward(self, x):
        return self.function(x, self.table)


def array(dtype):
    return torch.tensor([[200, 100, 3]]).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", TAKEN)
def test_taken(name, dtype):
    x, model = array(dtype), OfOne(TAKEN[name]).eval()
    want = model(x).numpy()
    for net in (torch2needle.convert(model), torch2needle.convert(model, (x,))):
        for run in (net, ndl.compile(net, (x,))):
            np.testing.assert_array_equal(np.asarray(run(x)), want)
            np.testing.assert_array_equal(np.asarray(run(x.numpy())), want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name, dtype):
    x, model = array(dtype), OfOne(REFUSED[name]).eval()
    net = torch2needle.convert(model)
    for call in (lambda: net(x), lambda: net(x.numpy()), lambda: ndl.compile(net, (x,))):
        with pytest.raises(TypeError, match=r"expects .* as int32 or wider"):
            call()
    with pytest.raises(torch2needle.ConversionError):
        torch2needle.convert(model, (x,))


def test_an_index_is_a_mask_in_torch():
    net = torch2needle.convert(OfTwo(lambda x, y: x[y]))
    with pytest.raises(TypeError, match="expects y as int32 or wider"):
        net(torch.rand(3), torch.tensor([1, 0, 1], dtype=torch.uint8))


@pytest.mark.parametrize("name", REFUSED)
def test_an_executable_of_wide_inputs_refuses_narrow_ones(name):
    x = array(torch.int32)
    exe = ndl.compile(torch2needle.convert(OfOne(REFUSED[name]).eval()), (x,))
    np.testing.assert_array_equal(np.asarray(exe(x)), REFUSED[name](x).numpy())
    with pytest.raises(TypeError, match=r"expects .* as int32 or wider"):
        exe(array(torch.uint8))


@pytest.mark.parametrize("function", [lambda x, y: x * y, lambda x, y: torch.where(y > 5, x, y) + y])
def test_a_float_makes_results_floats(function):
    net, narrow, x = torch2needle.convert(OfTwo(function).eval()), array(torch.uint8), torch.rand(1, 3)
    np.testing.assert_array_equal(np.asarray(net(x, narrow)), function(x, narrow).numpy())
    for x in (narrow, torch.tensor(300)):  # which as a tensor without axes leaves the other its dtype
        with pytest.raises(TypeError, match=r"expects .* as int32 or wider"):
            net(x, narrow)


WRITES = {
    "mul_": lambda x, y: x.mul_(y),
    "clamp_max_": lambda x, y: x.clamp_max_(y),
    "item": lambda x, y: x.__setitem__(0, y) or x,
    "masked": lambda x, y: x.masked_fill_(y > 1000, -1.0),
    "threshold_": lambda x, y: torch.threshold_(x, 150, -3),
    "made": lambda x, y: x.new_full((3,), 2) * -1 + y,
    "cast": lambda x, y: y.type_as(x),
}


@pytest.mark.parametrize("name", WRITES)
def test_writes_keep_the_dtype(name):
    net = torch2needle.convert(OfTwo(WRITES[name]).eval())
    with pytest.raises(TypeError, match=r"expects .* as int32 or wider"):
        net(array(torch.uint8), torch.tensor([-1000, 1000, 70000]))


def test_the_names_are_those_of_ops_and_layers():
    groups = ("COMPARES", "FLOATS_OF_ALL", "WHOLES_OF_ALL", "SHAPES", "PICKS", "MOVES", "CHOOSES", "ARITHMETIC")
    assert not {n for g in groups for n in getattr(narrow, g)} - OPS.keys() - vars(ndl.nn).keys()


def test_arithmetic_of_numbers_that_the_forward_narrows():
    model = OfOne(lambda x: x.to(torch.int8) + x.to(torch.int8)).eval()
    for example in (None, (torch.rand(3),)):
        with pytest.raises((torch2needle.ConversionError, torch2needle.Unsupported), match="as int32 or wider"):
            torch2needle.convert(model, example)


@pytest.mark.parametrize("share", [False, True])
def test_buffers(share):
    x = torch.rand(3)
    model = WithBuffer(lambda x, t: x * t + t.long() * 2).eval()
    np.testing.assert_array_equal(np.asarray(torch2needle.convert(model, share=share)(x)), model(x).numpy())
    for function in (lambda x, t: x * (t + t), lambda x, t: x * (t > -1)):
        with pytest.raises(
            (torch2needle.ConversionError, torch2needle.Unsupported), match="expects table as int32 or wider"
        ):
            torch2needle.convert(WithBuffer(function).eval(), share=share)


def test_a_guard_asks_a_narrow_buffer() -> None:
    """As of an ActNorm, whether it was initialised (Kingma & Dhariwal, arXiv 1807.03039)."""

    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("ready", torch.tensor(1, dtype=torch.uint8))
            self.scale = torch.nn.Parameter(torch.tensor(2.0))

        def forward(self, x: Any) -> Any:
            if self.ready.item() == 0:
                self.scale.data.copy_(1 / x.std())
            return x * self.scale

    model, x = Scaled().eval(), torch.randn(3, 2)
    net = torch2needle.convert(model, (x,))
    for run in (net, ndl.compile(net, (x,))):
        np.testing.assert_array_equal(run(x).numpy(), model(x).detach().numpy())
    assert int(net.state_dict()["ready"].numpy()) == 1
