"""What a forward asks of types and attributes of traced values: answered as torch's values answer, or refused.

Without an example nothing is compared with the model, so that a wrong answer would be a wrong branch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import needle as ndl
import torch2needle

# Whatever is asked of them is answered.
ANSWERED = """x; x.T; x.detach(); x > 0; self.lin(x); x.shape; x.size(); x.size(0); x.shape[0]; x.shape[0] / 2; x.shape[0] // 2;
x.shape[0] * 1.0; -x.shape[0]; x.shape[0] > 1; x.dtype; x.device; self.lin.weight; self.norm.running_mean;
self.lin.weight.shape[0]; self.training; self.lin.in_features""".replace("\n", " ").split("; ")
OTHERS = """x.max(); x.numel(); x.max(0); x.max(0).values; x.topk(1); x.split(1); x.unbind(); x.shape[:2]; x.shape + (1,);
x.stride(); x.requires_grad; x.grad_fn; x.is_floating_point(); x.layout; x.equal(x); x.dtype.itemsize; x.device.type;
x.item; x.names; self.gru(x); self.gru(x)[0]; self.pool(x); F.max_pool1d(x, 2, return_indices=True);
self.scores(x, x[:, 0].long()); torch.where(x > 0); 2**-x.shape[0];
(-x.shape[0]) ** 0.5; torch.var_mean(x); torch.is_tensor(x); torch.result_type(x, x)""".replace("\n", " ").split("; ")
QUESTIONS = (
    *("isinstance(v, torch.Tensor)", "isinstance(v, (tuple, list))", "isinstance(v, int)", "isinstance(v, float)"),
    *("isinstance(v, bool)", "isinstance(v, nn.Parameter)", "type(v) is torch.Tensor", "type(v) is int", "v is None"),
    *("callable(v)", "torch.is_tensor(v)", "hasattr(v, 'shape')", "hasattr(v, 'values')", "hasattr(v, '__len__')"),
    *("hasattr(v, 'mark')", "getattr(v, 'mark', 0) == 1"),
    "getattr(v, 'values', None) is None",
)
NET = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.norm, self.gru = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.GRU(4, 4)
        self.pool, self.scores = nn.MaxPool1d(2, return_indices=True), nn.AdaptiveLogSoftmaxWithLoss(4, 4, [2])
        self.lin.weight.mark = 1

    def forward(self, x):
        v = {value}
        return x * 2 if {question} else x * 3
"""


@pytest.mark.parametrize("value", [*ANSWERED, *OTHERS])
def test_questions_without_an_example(value: str) -> None:
    x = torch.tensor([[0.5, 1.0, 2.0, 3.0], [3.0, 0.0, 1.0, 0.2], [1.0, 2.0, 0.1, 0.4]])
    for question in QUESTIONS:
        names: dict[str, Any] = {"nn": nn, "torch": torch, "F": F}
        exec(compile(NET.format(value=value, question=question), "net.py", "exec"), names)
        model = names["Net"]().eval()
        try:
            net = torch2needle.convert(model)
        except torch2needle.ConversionError:
            assert value not in ANSWERED, (value, question)
            continue
        assert np.array_equal(net(ndl.Tensor(x.numpy())).numpy(), model(x).detach().numpy()), (value, question)
