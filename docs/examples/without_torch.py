"""needle alone, without torch: train a small net, save it, load it, run its plan. `python docs/examples/without_torch.py`"""

import tempfile
from pathlib import Path

import numpy as np

import needle as ndl
from needle import nn

draw = np.random.default_rng(0)
x = draw.standard_normal((256, 8)).astype("float32")
labels = (x[:, 0] > x[:, 1]).astype("int64")

net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
step = ndl.compile_step(net, ndl.ops.cross_entropy, ndl.optim.Adam(net.parameters(), lr=0.01), (x, labels))
for _ in range(60):
    loss = float(step(x, labels))
net.eval()

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "net.safetensors"
    ndl.save(net, path)
    exe = ndl.compile(ndl.load(path), (x,))
right = float((exe(x).argmax(1) == labels).mean())
print(f"kernels {ndl.isa()}, loss {loss:.4f}, right {right:.1%}")
assert right > 0.95
