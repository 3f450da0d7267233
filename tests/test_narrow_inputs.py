"""Inputs and buffers of fewer than 32 bits: equal to torch where their values are moved, compared or cast, else refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import needle as ndl
import operator_fusion
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
    "packed nibbles": lambda x: torch.stack([x & 15, x >> 4 & 15], -1).flatten(-2) ^ 1,
    "limits": lambda x: x.clamp(max=100).clamp_min(5),
    "whole quotient": lambda x: x // 7,
    "quotient towards zero": lambda x: torch.div(x, 7, rounding_mode="trunc"),
    "remainder": lambda x: x % 7 * 0.5,
    "remainder towards zero": lambda x: torch.fmod(x, 7),
}
REFUSED = {
    "add": lambda x: x + x,
    "negative": lambda x: -x,
    "less a number": lambda x: x - 101,
    "cast too late": lambda x: (x * x).float(),
    "bits": lambda x: ~x,
    "bits beyond": lambda x: x & 70000,
    "quotient by what it cannot be": lambda x: x // 70000,
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


def test_quotients_of_the_least_number_wrap_around():
    x, y = torch.tensor([-128, 7], dtype=torch.int8), torch.tensor([-1, 2], dtype=torch.int8)
    for model, inputs in ((OfOne(lambda x: x // -1), (x,)), (OfTwo(lambda x, y: x // y), (x, y))):
        with pytest.raises(TypeError, match="as int32 or wider"):
            torch2needle.convert(model)(*inputs)
    net = torch2needle.convert(OfTwo(lambda x, y: x // y))
    x, y = torch.tensor([200, 7], dtype=torch.uint8), torch.tensor([3, 2], dtype=torch.uint8)
    np.testing.assert_array_equal(net(x, y).numpy(), (x // y).numpy())


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
    groups = ("COMPARES", "FLOATS_OF_ALL", "WHOLES_OF_ALL", "SHAPES", "PICKS", "MOVES", "CHOOSES", "QUOTIENTS")
    groups += ("ARITHMETIC",)
    assert not {n for g in groups for n in getattr(narrow, g)} - OPS.keys() - vars(ndl.nn).keys()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "function",
    [
        lambda a, b: a + b,
        lambda a, b: (a - b) * 3,
        lambda a, b: -a * b,
        lambda a, b: (~a << 3).float() / 2,
        lambda a, b: torch.where(a + b > a, a - 100, b),
        lambda a, b: 5 - a,
    ],
)
def test_arithmetic_of_numbers_that_the_forward_narrows_wraps_around(function, dtype):
    x, y = torch.randint(-300, 300, (2, 50))
    model = OfTwo(lambda x, y: function(x.to(dtype), y.to(dtype))).eval()
    want = model(x, y).numpy()
    for net in (torch2needle.convert(model), torch2needle.convert(model, (x, y))):
        for run in (net, operator_fusion.fuse(net), ndl.compile(net, (x, y))):
            np.testing.assert_array_equal(np.asarray(run(x, y)), want)


@pytest.mark.parametrize("function", [lambda x: x.to(torch.int8) @ x.to(torch.int8).T, lambda x: x.to(torch.int8) ** 3])
def test_other_arithmetic_of_narrowed_numbers_is_refused(function):
    with pytest.raises((torch2needle.ConversionError, torch2needle.Unsupported), match="as int32 or wider"):
        torch2needle.convert(OfOne(function).eval(), (torch.rand(3, 3),))


def test_sums_of_two_narrow_dtypes_are_refused():
    """Since a tensor without axes leaves the other one its dtype."""
    model = OfOne(lambda x: x.to(torch.int8) + x.to(torch.int16).sum(dtype=torch.int16)).eval()
    with pytest.raises((torch2needle.ConversionError, torch2needle.Unsupported), match="as int32 or wider"):
        torch2needle.convert(model)


@pytest.mark.parametrize("share", [False, True])
def test_buffers(share):
    x = torch.rand(3)
    for function in (lambda x, t: x * t + t.long() * 2, lambda x, t: x * (t + t), lambda x, t: x * (~t - 1)):
        model = WithBuffer(function).eval()
        np.testing.assert_array_equal(np.asarray(torch2needle.convert(model, share=share)(x)), model(x).numpy())
    with pytest.raises(
        (torch2needle.ConversionError, torch2needle.Unsupported), match="expects table as int32 or wider"
    ):
        torch2needle.convert(WithBuffer(lambda x, t: x * (t > -1)).eval(), share=share)


def test_weights_of_four_bits():
    """Two to a byte, as GPTQ and AWQ pack them (arXiv 2210.17323, 2306.00978)."""

    class Linear4(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("packed", torch.randint(256, (5, 3), dtype=torch.uint8))
            self.register_buffer("scale", torch.rand(5, 2, 1))

        def forward(self, x):
            low, high = (self.packed & 0xF).to(torch.int8) - 8, (self.packed >> 4).to(torch.int8) - 8
            weight = torch.stack([low, high], -1).view(5, 2, 3) * self.scale
            return nn.functional.linear(x, weight.view(5, 6))

    model, x = Linear4().eval(), torch.randn(4, 6)
    net = torch2needle.convert(model, (x,))
    for run in (net, ndl.compile(operator_fusion.fuse(net), (x,))):
        np.testing.assert_allclose(run(x).numpy(), model(x).numpy(), rtol=1e-5, atol=1e-4)


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


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.float16, torch.bfloat16, torch.bool])
def test_verify_takes_dtypes_that_needle_has_not(dtype: torch.dtype) -> None:
    model, x = OfOne(lambda x: (x.float() / 3, x)).eval(), torch.tensor([[0, 1, 100]]).to(dtype)
    v = torch2needle.verify(model, torch2needle.convert(model, (x,)), x)
    assert v and all(o.errors.max_rel < 1e-6 for o in v.outputs)


@pytest.mark.parametrize("example", [False, True])
def test_a_narrow_buffer_in_the_dtype_of_another(example: bool) -> None:
    """As weights in eight bits, with a scale."""

    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("whole", torch.randint(-128, 128, (4, 3), dtype=torch.int8))
            self.scale = torch.nn.Parameter(torch.rand(4, 1))

        def forward(self, x: Any) -> Any:
            return x @ (self.whole.to(x.dtype) * self.scale).T + self.whole.type_as(x).sum()

    model, x = Scaled().eval(), torch.randn(2, 3)
    net = torch2needle.convert(model, (x,) if example else None)
    for run in (net, ndl.compile(net, (x,))):
        np.testing.assert_allclose(run(x).numpy(), model(x).detach().numpy(), rtol=1e-5, atol=1e-4)
