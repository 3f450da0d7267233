"""Training steps on GPUs: how their images lie."""

from __future__ import annotations

import copy

import numpy as np

import needle as ndl
from gpu_nets import image
from needle import nn
from needle.autograd import Tensor
from needle.backend_ndarray import Device


def test_images_stay_in_that_order_through_gradients(gpu: Device) -> None:
    """Norms, pools and data gradients write as they read; copied are only weights, into that order and back from it."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.conv2 = (nn.Conv(c, 8, 3, padding=1, bias=False, layout="torch") for c in (3, 8))
            self.norm1, self.norm2, self.head = nn.BatchNorm2d(8), nn.BatchNorm2d(8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = ndl.ops.max_pool2d(ndl.ops.relu(self.norm1(self.conv1(x))), 2, 2)
            return self.head(ndl.ops.relu(self.norm2(self.conv2(x))).mean((2, 3)))

    np.random.seed(0)
    net, x, y = Net().train(), image(2, 3, 8, 6), np.array([1, 3])
    losses = {}
    for device in (ndl.cpu(), gpu):
        there = copy.deepcopy(net).to(device)
        optimizer = ndl.optim.SGD(there.parameters(), lr=0.1)
        given = (Tensor(x, device=device), Tensor(y, device=device, dtype="int64"))
        step = ndl.compile_step(there, ndl.ops.cross_entropy, optimizer, given)
        losses[device] = [float(step(*given).numpy()) for _ in range(4)]
    np.testing.assert_allclose(losses[gpu], losses[ndl.cpu()], rtol=1e-4)
    weights = [
        shape
        for name, shape in zip(step.plan.names, step.plan.shapes, strict=True)
        if name == "copy" and len(shape) == 4
    ]
    assert weights == [(8, 3, 3, 8)] * 2 + [(8, 8, 3, 3)]  # of the second convolution, whose input has that order


def test_heads_are_copied_apart_for_products(gpu: Device) -> None:
    """Products of matrices in two axes of batches, whose rows hold several heads; transposed ones are copied as they lie."""
    draw = np.random.RandomState(0)
    rows = [Tensor(draw.randn(2, 20, 3, 32).astype("float32"), device=gpu) for _ in range(2)]

    def heads(a: Tensor, b: Tensor) -> Tensor:
        return a.transpose((1, 2)) @ b.transpose((1, 2)).transpose((2, 3))

    exe = ndl.compile(heads, tuple(rows))
    assert exe.plan.names == ["copy", "copy", "matmul_fused"]
    wanted = np.einsum("nihd,njhd->nhij", *(r.numpy().astype("float64") for r in rows))
    np.testing.assert_allclose(exe(*rows).numpy(), wanted, atol=1e-5)
    few = [r[:, :8] for r in rows]
    assert ndl.compile(heads, tuple(few)).plan.names == ["matmul_fused"]
