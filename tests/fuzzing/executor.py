"""Random calls of one executable: its results are those of the model as it is then, or a sentence says why not.

A case is a model and a list of (action, number); actions change shapes, kinds of arrays, parameters, attributes and modes, write
into given arrays, or run in several threads.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

import needle as ndl
import operator_fusion
from needle import nn, ops
from needle.graph import symbolic

from .frame import Wrong

NAME, SAMPLE, FULL, SECONDS = "executor", 300, 5_000, 60
SENTENCES = (ValueError, TypeError, KeyError, RuntimeError)
SHAPES = ((1, 3, 8, 8), (2, 3, 8, 8), (0, 3, 8, 8), (3, 3, 9, 7), (1, 3, 12, 5), (2, 3, 7, 8))


class Net(nn.Module):
    """What executables fold, pack, join and alias: convolutions, batch norms, joins, linear layers, buffers, a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv(3, 16, 3, padding=1, layout="torch"), nn.BatchNorm2d(16)
        self.deep = [nn.Conv(16, 16, 3, padding=1, layout="torch"), nn.Conv(16, 16, 1, groups=16, layout="torch")]
        self.fc, self.tail = nn.Linear(32, 6, layout="torch"), nn.Sequential(nn.ReLU(), nn.Linear(6, 6))
        self.shift = nn.Parameter(np.zeros((1, 16, 1, 1), "float32"))
        self.scale = 1.5

    def forward(self, x: Any) -> Any:
        a = ops.relu(self.norm(self.conv(x))) * self.scale + self.shift
        b = a
        for layer in self.deep:
            b = layer(b)
        both = ops.concat((a, ops.relu(b + a)), 1)
        pooled = ops.mean(both, (2, 3))
        return {"scores": self.tail(self.fc(pooled)), "maps": [both[:, 8:24], a]}


def fresh(shape: Any, n: int) -> np.ndarray:
    return np.random.default_rng(n).standard_normal(tuple(shape), dtype="float32")


def flat(out: Any) -> list[Any]:
    if isinstance(out, dict):
        return [v for part in out.values() for v in flat(part)]
    return [v for part in out for v in flat(part)] if isinstance(out, list | tuple) else [out]


class Session:
    """An executable, its model, and what the last call took."""

    def __init__(self, case: dict) -> None:
        np.random.seed(case["seed"])
        net = Net().eval()
        for name, t in net.norm.named_tensors():
            t.data = ndl.Tensor(np.abs(fresh(t.shape, 1)) + 0.5 if "var" in name else fresh(t.shape, 2) * 0.5)
        self.form = case["form"]
        self.net: Any = net if self.form in ("module", "function") else symbolic(net)
        if self.form == "fused":
            self.net = operator_fusion.fuse(self.net)
        self.source = net
        model = (lambda x: self.net(x)) if self.form == "function" else self.net
        self.exe = ndl.compile(model, (fresh(SHAPES[0], 0),), winograd=case["winograd"])
        self.shape = SHAPES[0]

    # -- calls -----------------------------------------------------------------------------------------------------------

    def wanted(self, x: np.ndarray) -> list[np.ndarray]:
        return [t.numpy() for t in flat(self.net(ndl.Tensor(x)))]

    def compare(self, got: Any, x: np.ndarray) -> None:
        want = self.wanted(x)
        for i, (g, w) in enumerate(zip(flat(got), want, strict=True)):
            g = np.asarray(g.detach() if hasattr(g, "detach") else g)
            if g.shape != w.shape or g.dtype != w.dtype:
                raise Wrong(f"output {i} is {g.dtype} {g.shape}, not {w.dtype} {w.shape}")
            if w.size and not np.abs(g - w).max() <= 3e-5 * max(1e-3, np.abs(w).max()):
                raise Wrong(f"output {i} differs by {np.abs(g - w).max() / np.abs(w).max():.1e}")

    def call(self, n: int) -> None:
        x = fresh(self.shape, n)
        self.compare(self.exe(x), x)

    def call_tensor(self, n: int) -> None:
        x = fresh(self.shape, n)
        self.compare(self.exe(ndl.Tensor(x)), x)

    def call_torch(self, n: int) -> None:
        import torch

        x = fresh(self.shape, n)
        t = torch.from_numpy(x)
        t = (t, t.permute(1, 0, 2, 3).contiguous().permute(1, 0, 2, 3), t.to(memory_format=torch.channels_last))[n % 3]
        self.compare(self.exe(t), x)

    def call_strided(self, n: int) -> None:
        x = fresh(self.shape, n)
        shifted = np.frombuffer(b"." * (n % 3 + 1) + x.tobytes(), "uint8")[n % 3 + 1 :].view("float32").reshape(x.shape)
        locked = x.copy()
        locked.flags.writeable = False
        kinds = (
            x[:, :, ::-1][:, :, ::-1],
            np.asfortranarray(x),
            shifted,
            locked,
            x.astype(">f4"),
            np.repeat(x, 2, 3)[..., ::2],
        )
        self.compare(self.exe(kinds[n % len(kinds)]), x)

    def call_half(self, n: int) -> None:
        x = fresh(self.shape, n).astype("float16")
        self.compare(self.exe(x), x.astype("float32"))

    def call_into(self, n: int) -> None:
        x = fresh(self.shape, n)
        outs = [np.full(w.shape, np.nan, "float32") for w in self.wanted(x)]
        if n % 3 == 1:
            outs = [np.full((*w.shape[:-1], 2 * w.shape[-1]), np.nan, "float32")[..., ::2] for w in outs]
        self.exe.run_into(outs, x)
        self.compare(outs, x)

    def refused_into(self, n: int) -> None:
        x = fresh(self.shape, n)
        if 0 in self.shape:
            return
        outs = [np.zeros(w.shape, "float32") for w in self.wanted(x)]
        kinds: list[Callable[[], None]] = [
            lambda: outs[0].setflags(write=False),
            lambda: outs.__setitem__(1, np.broadcast_to(np.zeros(1, "float32"), outs[1].shape)),
            lambda: outs.__setitem__(1, outs[2]),
            lambda: outs.__setitem__(0, outs[0].astype("float64")),
            lambda: outs.pop(),
        ]
        kinds[n % len(kinds)]()
        self.refused(lambda: self.exe.run_into(outs, x))

    def refused_call(self, n: int) -> None:
        x = fresh(self.shape, n)
        kinds = (
            x.astype("float64"),
            x.tolist(),
            fresh(self.shape[1:], n),
            x[:, :2],
            x.astype("complex64"),
            None,
            3.0,
            x.astype("uint8"),
        )
        self.refused(lambda: self.exe(kinds[n % len(kinds)]))

    def refused(self, f: Callable[[], Any]) -> None:
        try:
            f()
        except SENTENCES as e:
            if not str(e).strip("'\"").startswith("["):
                raise Wrong(f"no sentence: {type(e).__name__}: {e}") from e
            return
        raise Wrong("was not refused")

    def threads(self, n: int) -> None:
        xs = [fresh(SHAPES[(n + i) % 3], n + i) for i in range(3)]
        got: list[Any] = [None] * 3

        def work(i: int) -> None:
            for _ in range(3):
                got[i] = self.exe(xs[i])

        threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        for g, x in zip(got, xs, strict=True):
            self.compare(g, x)

    def kept(self, n: int) -> None:
        """Results are the caller's: later runs leave them alone."""
        x = fresh(self.shape, n)
        got = self.exe(x)
        before = [np.array(g) for g in flat(got)]
        self.exe(fresh(self.shape, n + 1))
        for g, b in zip(flat(got), before, strict=True):
            if not np.array_equal(np.asarray(g), b):
                raise Wrong("a later run changed a result")

    # -- changes ---------------------------------------------------------------------------------------------------------

    def reshape(self, n: int) -> None:
        self.shape = SHAPES[n % len(SHAPES)]

    def parameters(self) -> list[Any]:
        return [t for _, t in self.source.named_tensors() if len(t.shape) > 1] + [
            self.source.norm.weight,
            self.source.norm.running_mean,
        ]

    def write(self, n: int) -> None:
        t = self.parameters()[n % len(self.parameters())]
        t.data = ndl.Tensor(fresh(t.shape, n) * 0.3)

    def write_strided(self, n: int) -> None:
        t = self.source.fc.weight
        t.data = ndl.Tensor(fresh(t.shape[::-1], n) * 0.3).transpose(0, 1)

    def write_in_place(self, n: int) -> None:
        t = self.parameters()[n % len(self.parameters())]
        t.cached_data[...] = 0.25

    def write_view(self, n: int) -> None:
        t = self.parameters()[n % len(self.parameters())]
        t.cached_data.numpy_view()[...] *= 0.5
        self.exe.refresh()

    def replace(self, n: int) -> None:
        if self.form == "fused":
            return
        fc = self.source.fc if self.form != "graph" else self.net.fc
        fc.weight = nn.Parameter(fresh(fc.weight.shape, n))
        self.source.fc.weight = fc.weight

    def load(self, n: int) -> None:
        self.source.load_state_dict(
            {k: np.abs(fresh(v.shape, n)) * 0.4 + 0.1 for k, v in self.source.state_dict().items()}
        )

    def attribute(self, n: int) -> None:
        if self.form in ("module", "function"):
            self.source.scale = 0.5 + n % 4
        if self.form != "fused":
            self.source.norm.eps = (1e-5, 1e-2, 1.0)[n % 3]

    def layers(self, n: int) -> None:
        if self.form not in ("module", "function"):
            return
        deep = self.source.deep
        if n % 3 == 0 and len(deep) > 1:
            deep.pop()
        elif n % 3 == 1 and len(deep) < 4:
            deep.append(nn.Conv(16, 16, 1, layout="torch"))
        else:
            self.source.tail = nn.Sequential(nn.Linear(6, 3))

    def train(self, n: int) -> None:
        self.net.train()
        self.source.train()
        if self.form != "function":
            self.refused(lambda: self.exe(fresh(self.shape, n)))
        self.net.eval()
        self.source.eval()

    def optimize(self, n: int) -> None:
        x = fresh(SHAPES[1], n)
        loss = flat(self.net(ndl.Tensor(x)))[0].sum()
        loss.backward()
        ndl.optim.SGD(self.net.parameters(), lr=1e-3).step()

    def hook(self, n: int) -> None:
        if self.form in ("module", "function"):
            handle = self.source.fc.register_forward_hook(lambda m, args, out: out * 2.0)
            self.call(n)
            handle.remove()

    def refresh(self, n: int) -> None:
        self.exe.refresh()

    def guards(self, n: int) -> None:
        """A plan of another shape, made and run with guards."""
        import os

        os.environ["NEEDLE_GUARD"] = "1"
        try:
            shape = (1 + n % 2, 3, 4 + n % 7, 3 + n % 5)
            x = fresh(shape, n)
            self.compare(self.exe(x), x)
        finally:
            del os.environ["NEEDLE_GUARD"]


ACTIONS = [
    n for n in vars(Session) if not n.startswith("_") and n not in ("wanted", "compare", "refused", "parameters")
]


def draw(rng: random.Random) -> dict:
    return {
        "form": rng.choice(["module", "function", "graph", "fused"]),
        "winograd": rng.choice(["auto", "f2", "off"]),
        "seed": rng.randrange(100),
        "actions": [(rng.choice(ACTIONS), rng.randrange(60)) for _ in range(rng.randint(2, 14))],
    }


def check(case: dict) -> str:
    session = Session(case)
    for name, n in case["actions"]:
        getattr(session, name)(n)
        session.call(n)
    return f"agrees, {case['form']}"


def smaller(case: dict) -> Iterable[dict]:
    actions = case["actions"]
    for size in (4, 2, 1):
        for i in range(0, len(actions), size):
            if len(actions) > size:
                yield case | {"actions": actions[:i] + actions[i + size :]}
    for i, (name, n) in enumerate(actions):
        if n > 5:
            yield case | {"actions": [*actions[:i], (name, n % 6), *actions[i + 1 :]]}
    if case["form"] != "module":
        yield case | {"form": "module"}
    if case["winograd"] != "off":
        yield case | {"winograd": "off"}
