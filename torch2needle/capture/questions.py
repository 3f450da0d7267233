"""Calls that ask for values or sizes, in the place of which forwards under capture make others, that do not."""

from __future__ import annotations

import itertools
import math
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules import adaptive
from torch.utils import _pytree as pytree

from .formulas import of_numbers
from .guard import patched


def plain_masks() -> AbstractContextManager:
    """torch.nn.attention.bias.causal_lower_right and causal_upper_left make tensors, not a class of tensors without values."""
    bias, thread = sys.modules.get("torch.nn.attention.bias"), threading.get_ident()
    if bias is None:
        return patched([])
    before = bias.CausalBias.__new__

    def new(cls: Any, variant: Any, queries: Any, keys: Any) -> Any:
        if threading.get_ident() != thread:
            return before(cls, variant, queries, keys)
        last = variant == bias.CausalVariant.LOWER_RIGHT
        return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries if last else 0)

    return patched([(bias.CausalBias, "__new__", new)])


def without_questions() -> AbstractContextManager:
    """Calls that ask for values, which torch.export does not know, become others that do not."""
    shapes = (*of_counts(), *of_moves(), *of_shapes())
    return patched([*of_covariances(), *of_combinations(), *of_clusters(), *shapes, *of_numbers()])


def of_moves() -> list[tuple]:
    """`self.layer.to(x.device)` leaves a module as it is that is there; torch's own puts its parameters in anew."""
    before, thread = torch.nn.Module.to, threading.get_ident()

    def stays(t: torch.Tensor, device: Any, dtype: Any) -> bool:
        there = device is None or (device.type == t.device.type and device.index in (None, t.device.index))
        return there and (dtype in (None, t.dtype) or not (t.is_floating_point() or t.is_complex()))

    def to(self: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        if threading.get_ident() != thread:
            return before(self, *args, **kwargs)
        device, dtype, _, layout = torch._C._nn._parse_to(*args, **kwargs)
        same = layout is None and all(stays(t, device, dtype) for t in (*self.parameters(), *self.buffers()))
        return self if same else before(self, *args, **kwargs)

    return [(torch.nn.Module, "to", to)]


def of_covariances() -> list[tuple]:
    """Covariances without weights become the calls that they are made of; torch's own ask whether there is an observation."""
    thread = threading.get_ident()

    def cov(x: torch.Tensor, correction: int = 1) -> torch.Tensor:
        rows = x if x.ndim == 2 else x.reshape(1, -1)
        rows = rows if rows.is_floating_point() else rows.float()
        apart = rows - rows.mean(1, keepdim=True)
        made = apart @ apart.T / torch.sym_max(rows.shape[1] - correction, 0)
        return made.squeeze() if rows.shape[0] == 1 else made

    def corrcoef(x: torch.Tensor) -> torch.Tensor:
        made = cov(x)
        if not made.ndim:
            return made / made
        deviation = made.diagonal().sqrt()
        return (made / deviation.unsqueeze(1) / deviation).clamp(-1, 1)

    def instead(before: Callable, own: Callable) -> Callable:
        def call(input: torch.Tensor, **how: Any) -> torch.Tensor:
            plain = how.keys() <= {"correction"} and input.ndim < 3 and not input.is_complex()
            return own(input, **how) if plain and threading.get_ident() == thread else before(input, **how)

        return call

    places = [(owner, f) for owner in (torch, torch.Tensor) for f in (cov, corrcoef)]
    return [(vars(torch) if o is torch else o, f.__name__, instead(getattr(o, f.__name__), f)) for o, f in places]


def of_combinations() -> list[tuple]:
    """torch.combinations picks by a list of places; torch's own result has as many rows as a mask says."""
    before, thread = torch.combinations, threading.get_ident()

    def combinations(input: torch.Tensor, r: int = 2, with_replacement: bool = False) -> torch.Tensor:
        if threading.get_ident() != thread or input.ndim != 1 or r < 1:
            return before(input, r, with_replacement)
        if r == 2:
            n = input.shape[0]
            return input[torch.triu_indices(n, n, 0 if with_replacement else 1).T]
        chosen = itertools.combinations_with_replacement if with_replacement else itertools.combinations
        return input[torch.tensor(list(chosen(range(len(input)), r)), dtype=torch.int64).reshape(-1, r)]

    return [(vars(torch), "combinations", combinations)]


def of_counts() -> list[tuple]:
    """Windows, scales and places of a triangle, as many as a free size says, where torch's own take plain numbers."""
    thread = threading.get_ident()

    def turns(n: Any, periodic: bool, dtype: Any) -> torch.Tensor:
        return torch.arange(n, dtype=dtype or torch.get_default_dtype()) * (2 * math.pi / (n if periodic else n - 1))

    def hamming_window(
        n: Any, periodic: bool = True, alpha: float = 0.54, beta: float = 0.46, *, dtype: Any = None, **_: Any
    ) -> torch.Tensor:
        return alpha - beta * turns(n, periodic, dtype).cos()

    def hann_window(n: Any, periodic: bool = True, *, dtype: Any = None, **_: Any) -> torch.Tensor:
        return hamming_window(n, periodic, 0.5, 0.5, dtype=dtype)

    def blackman_window(n: Any, periodic: bool = True, *, dtype: Any = None, **_: Any) -> torch.Tensor:
        at = turns(n, periodic, dtype)
        return 0.42 - 0.5 * at.cos() + 0.08 * (2 * at).cos()

    def bartlett_window(n: Any, periodic: bool = True, *, dtype: Any = None, **_: Any) -> torch.Tensor:
        return 1 - (turns(n, periodic, dtype) / math.pi - 1).abs()

    def linspace(start: Any, end: Any, steps: Any, *, dtype: Any = None, **_: Any) -> Any:
        """From both ends to the middle, as torch's."""
        if dtype and not dtype.is_floating_point:
            return NotImplemented
        at, step = (
            torch.arange(steps, dtype=dtype or torch.get_default_dtype()),
            (end - start) / torch.sym_max(steps - 1, 1),
        )
        return torch.where(at < steps // 2, start + at * step, end - (steps - 1 - at) * step)

    def logspace(start: Any, end: Any, steps: Any, base: float = 10.0, *, dtype: Any = None, **_: Any) -> Any:
        made = linspace(start, end, steps, dtype=dtype)
        return made if made is NotImplemented else base**made

    def triangle(mask: Callable, sign: int) -> Callable:
        def indices(row: Any, col: Any, offset: int = 0, *, dtype: Any = torch.int64, **_: Any) -> Any:
            """The places of a square, as many as up to the nearer corner, or all without those."""
            if row != col:
                return NotImplemented
            above, all_places = sign * offset, row * row
            side = torch.sym_max(row - above if above > 0 else row + above - 1, 0)
            corner = side * (side + 1) // 2
            kept = mask(torch.ones(row, row, dtype=torch.bool), offset)
            places = torch.where(kept, torch.arange(all_places).view(row, row), all_places).flatten().sort().values
            found = places[: corner if above > 0 else all_places - corner]
            return torch.stack([found // row, found % row]).to(dtype)

        return indices

    own: dict[str, Callable] = {
        f.__name__: f for f in (hamming_window, hann_window, blackman_window, bartlett_window, linspace, logspace)
    }
    own |= {"triu_indices": triangle(torch.triu, 1), "tril_indices": triangle(torch.tril, -1)}
    quotient = (torch.SymInt, "__divmod__", lambda a, b: (a // b, a % b))  # which torch lacks
    return [quotient, *((vars(torch), name, where_free(getattr(torch, name), f, thread)) for name, f in own.items())]


def where_free(before: Callable, own: Callable, thread: int) -> Callable:
    """`own` where one of the arguments is a free size or a value of a capture, in this thread."""

    def call(*args: Any, **how: Any) -> Any:
        free = any(isinstance(n, torch.SymInt | FakeTensor) for n in (*args, *how.values())) and "out" not in how
        made = own(*args, **how) if free and threading.get_ident() == thread else NotImplemented
        return before(*args, **how) if made is NotImplemented else made

    return call


def of_shapes() -> list[tuple]:
    """Calls whose parts in torch have sizes of the example become others that leave them free."""
    thread = threading.get_ident()

    def fill_diagonal_(self: torch.Tensor, fill_value: Any, wrap: bool = False) -> Any:
        if self.ndim != 2 or wrap:
            return NotImplemented
        self.diagonal().fill_(fill_value)
        return self

    def take_along_dim(input: torch.Tensor, indices: torch.Tensor, dim: int | None = None) -> Any:
        if dim is None or input.ndim != indices.ndim:
            return NotImplemented
        apart = dim % input.ndim
        same = all(a == b for i, (a, b) in enumerate(zip(input.shape, indices.shape, strict=True)) if i != apart)
        return input.gather(dim, indices) if same else NotImplemented

    def kron(input: torch.Tensor, other: torch.Tensor) -> Any:
        if input.ndim != other.ndim:
            return NotImplemented
        places = range(input.ndim)
        a, b = input[tuple(v for _ in places for v in (slice(None), None))], other[(None, slice(None)) * other.ndim]
        return (a * b).reshape([input.shape[i] * other.shape[i] for i in places])

    def has_sizes(data: Any) -> bool:
        parts = pytree.tree_leaves(list(data) if isinstance(data, torch.Size) else data)
        return any(isinstance(n, torch.SymInt | torch.SymFloat) for n in parts)

    def new_tensor(self: torch.Tensor, data: Any, *, dtype: Any = None, **how: Any) -> Any:
        return torch.tensor(data, dtype=dtype or self.dtype, **how) if has_sizes(data) else NotImplemented

    def as_tensor(data: Any, dtype: Any = None, device: Any = None) -> Any:
        return torch.tensor(data, dtype=dtype, device=device) if has_sizes(data) else NotImplemented

    def _infer_size(one: Any, other: Any) -> Any:
        return torch.broadcast_shapes(one, other) if has_sizes(one) or has_sizes(other) else NotImplemented

    def full(size: Any, fill_value: Any, *, dtype: Any = None, **_: Any) -> Any:
        if not isinstance(fill_value, torch.Tensor):
            return NotImplemented
        kind = torch.get_default_dtype() if fill_value.is_floating_point() else fill_value.dtype
        return fill_value.to(dtype or kind).expand(size).clone()

    def full_like(input: torch.Tensor, fill_value: Any, *, dtype: Any = None, **_: Any) -> Any:
        if not isinstance(fill_value, torch.Tensor):
            return NotImplemented
        return fill_value.to(dtype or input.dtype).expand(input.shape).clone()

    def stacked(data: Any) -> torch.Tensor:
        if isinstance(data, list | tuple):
            return torch.stack([stacked(d) for d in data])
        return data.detach() if isinstance(data, torch.Tensor) else torch.scalar_tensor(data)

    def tensor(data: Any, *, dtype: Any = None, **how: Any) -> Any:
        if has_sizes(data):
            return torch._refs.tensor(
                data, dtype=dtype, **how
            )  # as torch.export has it, which looks for torch's own name
        leaves = pytree.tree_leaves(data) if isinstance(data, list | tuple) else []
        given = [t for t in leaves if isinstance(t, torch.Tensor)]
        if not given or not all(t.is_floating_point() and not t.ndim for t in given):
            return NotImplemented
        return stacked(data).to(dtype or torch.get_default_dtype())

    def one_hot(input: torch.Tensor, num_classes: Any = -1) -> Any:
        if not isinstance(num_classes, torch.SymInt):
            return NotImplemented
        return torch.zeros(*input.shape, num_classes, dtype=torch.int64).scatter(-1, input.unsqueeze(-1), 1)

    def instead(before: Callable, own: Callable) -> Callable:
        def call(*args: Any, **how: Any) -> Any:
            made = own(*args, **how) if threading.get_ident() == thread and "out" not in how else NotImplemented
            return before(*args, **how) if made is NotImplemented else made

        return call

    own: list[tuple[Any, Callable]] = [
        (torch.Tensor, fill_diagonal_),
        (torch.Tensor, new_tensor),
        (torch, as_tensor),
        (torch._C, _infer_size),
        (torch, full),
        (torch, full_like),
        (torch, tensor),
        (torch.nn.functional, one_hot),
    ]
    places = [*own, *((o, f) for o in (torch, torch.Tensor) for f in (take_along_dim, kron))]
    return [(o if o is torch.Tensor else vars(o), f.__name__, instead(getattr(o, f.__name__), f)) for o, f in places]


def of_clusters() -> list[tuple]:
    """An adaptive softmax picks from the logarithms of all classes; torch's own asks which rows are of which cluster."""
    layer, thread = adaptive.AdaptiveLogSoftmaxWithLoss, threading.get_ident()
    before = layer.forward

    def forward(self: Any, input_: torch.Tensor, target_: torch.Tensor) -> Any:
        rows = {(2, 1): input_, (1, 0): input_.unsqueeze(0)}.get((input_.ndim, target_.ndim))
        if threading.get_ident() != thread or rows is None:
            return before(self, input_, target_)
        chosen = self.log_prob(rows).gather(1, target_.reshape(-1, 1)).reshape(target_.shape)
        return adaptive._ASMoutput(chosen, -chosen.mean())

    return [(layer, "forward", forward)]
