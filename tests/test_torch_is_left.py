"""What conversions put in the place of torch's functions is gone afterwards, from modules that torch loads meanwhile, too."""

from __future__ import annotations

import subprocess
import sys

SETUP = """
import sys, types, builtins, math, random
import numpy
import torch
import torch.export
from torch import nn
from torch.nn import functional as F

torch.compile(nn.Sequential(nn.ReLU()), backend="eager")(torch.ones(1))  # by which torch replaces some of its functions
OWNERS = [torch, torch.Tensor, nn.Module, nn.Parameter, F, torch.compiler, torch.autograd.Function, builtins, math, random]
before = [dict(vars(o)) for o in OWNERS]
import torch2needle
HOME = torch2needle.__path__[0]

class Net(nn.Module):
    def __init__(self, forward):
        super().__init__()
        self.inner, self.norm, self.step = nn.Linear(6, 6), nn.BatchNorm1d(6), forward

    def forward(self, x):
        return self.step(self.inner(x), self)

class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x ** 3

    @staticmethod
    def backward(ctx, g):
        return 3 * ctx.saved_tensors[0] ** 2 * g

def whole(x, net):
    return F.relu(x) if x.shape[1] % 2 == 0 else x

def values(x, net):
    return x * x.max().item() if (x < 9).all() else -x

def refused(x, net):
    return x.new_tensor(torch.linalg.lstsq(x, x).solution.tolist())

def failing(x, net):
    return torch.ones(3) @ x.T.T.T

example = torch.randn(4, 6)
"""

LEFT = """
def changed():
    for owner, old in zip(OWNERS, before):
        new = dict(vars(owner))
        yield from (f"{owner}.{n}" for n in old if new.get(n) is not old[n])
        if isinstance(owner, type):
            yield from (f"{owner}.{n}" for n in new.keys() - old.keys())
    for name, module in list(sys.modules.items()):
        if module is None or name.partition(".")[0] not in ("torch", "numpy"):
            continue
        for n, v in list(vars(module).items()):
            inside = list(vars(v).items()) if isinstance(v, type) else [("", v)]
            yield from (f"{name}.{n}.{k}" for k, f in inside if ours(f))

def ours(f):
    f = f.__func__ if isinstance(f, staticmethod | classmethod | types.MethodType) else f
    return isinstance(f, types.FunctionType) and f.__code__.co_filename.startswith(HOME)

for way in sys.argv[1:]:
    try:
        eval(way)
    except torch2needle.ConversionError:
        pass
    found = sorted(set(changed()))
    assert not found, (way, found)
"""

WAYS = (
    "torch2needle.convert(Net(lambda x, net: F.gelu(net.norm(x))).eval(), (example,))",
    "torch2needle.convert(Net(whole).eval(), (example,))",
    "torch2needle.convert(Net(values).eval(), (example,))",
    "torch2needle.convert(Net(lambda x, net: Cube.apply(x)).eval(), (example,))",
    "torch2needle.convert(Net(lambda x, net: torch.func.vmap(torch.sin)(x)).eval(), (example,))",
    "torch2needle.convert(nn.GRU(6, 3), (example,))",
    "torch2needle.check(Net(refused).eval(), (example,))",
    "torch2needle.convert(Net(refused).eval(), (example,), fallback='torch')(example)",
    "torch2needle.check(Net(failing).eval(), (example,))",
    "torch.compile(Net(whole).eval(), backend='needle')(example)",
)


def test_torch_is_as_before() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", SETUP + LEFT, *WAYS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
