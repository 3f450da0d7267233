"""Caches outside of the model, which a capture leaves as they were: global names, classes, functions, functools.lru_cache."""

from __future__ import annotations

import functools
import types
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import needle as ndl  # noqa: E402
import torch2needle  # noqa: E402

T = torch.Tensor


def lower(n: int) -> T:
    return torch.ones(n, n).tril()


TABLE: dict[Any, Any] = {}
NESTED: dict[str, dict[int, T]] = {"masks": {}}
LATEST: T | None = None


def of_table(n: int) -> T:
    if n not in TABLE:
        TABLE[n] = lower(n)
    return TABLE[n]


def of_nested(n: int) -> T:
    if n not in NESTED["masks"]:
        NESTED["masks"][n] = lower(n)
    return NESTED["masks"][n]


def of_name(n: int) -> T:
    global LATEST
    if LATEST is None or LATEST.shape[0] != n:
        LATEST = lower(n)
    return LATEST


def of_itself(n: int) -> T:
    if not hasattr(of_itself, "held") or of_itself.held.shape[0] != n:
        of_itself.held = lower(n)  # type: ignore[attr-defined]
    return of_itself.held


def of_default(n: int, held: dict = {}) -> T:  # noqa: B006
    if n not in held:
        held[n] = lower(n)
    return held[n]


@functools.lru_cache
def of_cache(n: int) -> T:
    return lower(n)


def remembered(f: Callable) -> Callable:
    held: dict[Any, T] = {}
    last: Any = None

    @functools.wraps(f)
    def call(*args: Any) -> T:
        nonlocal last
        if args not in held:
            held[args] = f(*args)
        last = held[args]
        return last

    return call


class Holder:
    held: T | None = None
    table: dict[int, T] = {}

    def __init__(self) -> None:
        self.own: dict[int, T] = {}

    def of_class(self, n: int) -> T:
        if Holder.held is None or Holder.held.shape[0] != n:
            Holder.held = lower(n)
        return Holder.held

    def of_class_table(self, n: int) -> T:
        if n not in self.table:
            self.table[n] = lower(n)
        return self.table[n]

    def __call__(self, n: int) -> T:
        if n not in self.own:
            self.own[n] = lower(n)
        return self.own[n]

    @staticmethod
    @functools.lru_cache(maxsize=4)
    def of_static_cache(n: int) -> T:
        return lower(n)

    @functools.lru_cache(None)  # noqa: B019
    def of_method_cache(self, n: int) -> T:
        return lower(n)


HOLDER = Holder()


def of_global_object(n: int) -> T:
    return HOLDER(n)


WAYS: dict[str, Callable[[], Callable[[int], T]]] = {
    "table": lambda: of_table,
    "nested": lambda: of_nested,
    "name": lambda: of_name,
    "function": lambda: of_itself,
    "default": lambda: of_default,
    "closure": lambda: remembered(lower),
    "class": lambda: Holder().of_class,
    "class table": lambda: Holder().of_class_table,
    "object": Holder,
    "global object": lambda: of_global_object,
    "lru_cache": lambda: of_cache,
    "static lru_cache": lambda: Holder.of_static_cache,
    "lru_cache of a method": lambda: Holder().of_method_cache,
}


class Masked(nn.Module):
    def __init__(self, mask: Callable[[int], T]) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)
        self.mask = mask

    def forward(self, x: T) -> T:
        return self.mask(x.shape[1]) @ self.layer(x)


def holds(way: Callable) -> list[Any]:
    """What the caches hold, besides functools'."""
    held = [
        *TABLE.values(),
        *NESTED["masks"].values(),
        LATEST,
        Holder.held,
        *Holder.table.values(),
        *HOLDER.own.values(),
    ]
    held += [getattr(of_itself, "held", None), *of_default.__defaults__[0].values()]  # type: ignore[index]
    for cell in getattr(way, "__closure__", None) or ():
        held += cell.cell_contents.values() if isinstance(cell.cell_contents, dict) else [cell.cell_contents]
    return [t for t in held if t is not None and t is not lower]


@pytest.mark.parametrize("filled", [False, True], ids=["empty", "filled"])
@pytest.mark.parametrize("name", WAYS)
def test_caches_are_as_before(name: str, filled: bool) -> None:
    TABLE.clear(), NESTED["masks"].clear(), Holder.table.clear(), HOLDER.own.clear()
    of_default.__defaults__[0].clear()  # type: ignore[index]
    global LATEST
    LATEST = Holder.held = None
    vars(of_itself).pop("held", None)
    way = WAYS[name]()
    model, x = Masked(way).eval(), torch.randn(2, 5, 3)
    if filled:
        model(x)
    before = holds(way)
    net = torch2needle.convert(model, (x,))
    after = holds(way)
    assert len(after) == len(before) and all(a is b for a, b in zip(after, before, strict=True))
    assert type(way(5)) is T  # not what a capture computes with
    for rows in (x, torch.randn(3, 5, 3)):
        for form in (net, ndl.compile(net, (rows,))):
            assert np.allclose(form(rows).numpy(), model(rows).detach().numpy(), atol=1e-5)


def test_lru_cache_leaves_sizes_free() -> None:
    model, x = Masked(of_cache).eval(), torch.randn(2, 7, 3)
    net = torch2needle.convert(model, (torch.randn(2, 5, 3),))
    assert np.allclose(net(x).numpy(), model(x).detach().numpy(), atol=1e-5)


SEEN: dict[str, Any] = {}


def keep(_: nn.Module, inputs: Any, output: T) -> None:
    SEEN["output"] = output


class Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)
        self.layer.register_forward_hook(keep)

    def forward(self, x: T) -> T:
        return self.layer(x).relu() + SEEN["output"].mean()


@pytest.mark.parametrize("with_example", [False, True])
def test_what_hooks_keep(with_example: bool) -> None:
    SEEN.clear()
    model, x = Hooked().eval(), torch.randn(2, 3)
    net = torch2needle.convert(model, *((x,),) * with_example)
    assert not SEEN
    assert np.allclose(net(x).numpy(), model(x).detach().numpy(), atol=1e-5)


class Making(OrderedDict):
    """What it holds are classes and arguments, of which a look makes objects, as transformers' table of activations does."""

    def __getitem__(self, key: str) -> Any:
        kind, arguments = super().__getitem__(key)
        return kind(**arguments)


ACTIVATIONS = Making(relu=(nn.ReLU, {}), leaky=(nn.LeakyReLU, {"negative_slope": 0.2}))


def test_containers_that_make_what_they_give() -> None:
    class Model(nn.Module):
        def forward(self, x: T) -> T:
            return ACTIVATIONS["leaky"](x) + (1 if x.sum() > 1e6 else 0)

    x = torch.randn(3, 4)
    net = torch2needle.convert(Model(), (x,))
    assert torch2needle.verify(Model(), net, (x,))
    assert [*ACTIVATIONS] == ["relu", "leaky"] and type(ACTIVATIONS["leaky"]) is nn.LeakyReLU


def elsewhere(source: str, **given: Any) -> Any:
    """A module of a user's that is made of its source."""
    made = types.ModuleType("elsewhere")
    vars(made).update(given)
    exec(source, vars(made))
    return made


DEEP = elsewhere(
    """
import torch
def scaled(x, by=2):
    return x * by if isinstance(x, torch.Tensor) else x
def kind(x):
    return 3.0 if type(x) is torch.Tensor else 1.0
def called(x):
    return x if callable(x) else x - 1
def named(x):
    return x + 5 if hasattr(x, "ndim") and not hasattr(x, "nodes") else x
def axes(x):
    return x.sum(dim=tuple(range(1, len(x.shape))))
"""
)
MIDDLE = elsewhere(
    """
class Scale:
    def of(self, x):
        return deep.scaled(x, 3)
def passed(x):
    return deep.kind(x) * x
""",
    deep=DEEP,
)
SCALE = MIDDLE.Scale()
ASKS = {
    "scaled": lambda x: DEEP.scaled(x),
    "kind": lambda x: x * DEEP.kind(x),
    "callable": lambda x: DEEP.called(x),
    "hasattr": lambda x: DEEP.named(x),
    "through another module": lambda x: MIDDLE.passed(x),
    "of an object": lambda x: SCALE.of(x),
}


@pytest.mark.parametrize("name", [*ASKS, "len"])
def test_functions_of_other_modules_see_tensors(name: str) -> None:
    """What functions that a forward calls ask of types, in whatever module they stand, is asked of what proxies stand for."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: T) -> T:
            return (ASKS.get(name) or DEEP.axes)(self.linear(x))

    torch.manual_seed(0)
    model, x = Model(), torch.randn(3, 4)
    net = torch2needle.convert(model, (x,))
    assert net.report.capture == "torch.fx"
    for batch in (3, 5):
        assert torch2needle.verify(model, net, (torch.randn(batch, 4),))
