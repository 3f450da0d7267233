"""What a forward asks of tensors' values, for torch.export: the example's answers, each with a check in the captured graph.

Python cannot follow a tensor that has no value yet. So the model runs once on the example, and every `if x.any():`, `.item()`,
`int(x)`, `for row in x.nonzero():`, `torch.equal(x, y)` is noted with its answer; a capture of the same call gives these
answers again and leaves a call of `asked` behind.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from needle.autograd import Unsupported
from needle.backend_ndarray import FLOATS
from needle.graph import Symbol
from needle.graph.steps import of_parameters

from ..rules.overloads import draws, drops
from .calls import fresh
from .guard import (
    Writes,
    gradients_where_asked,
    has_storage,
    inference_without_gradients,
    patched,
    plain_conditions,
    same_chance,
)
from .numbers import Answer, Real, Scopes, caller
from .state import untouched

NAMES = ("__bool__", "__int__", "__float__", "__index__", "__iter__", "item", "tolist", "numpy")
WHOLE = (torch.int32, torch.int64)  # whose rows may be as many as values tell
LIBRARY = torch.library.Library("torch2needle", "FRAGMENT")
LIBRARY.define("asked(Tensor x, float[] expected, str text) -> ()")


def equal(input: torch.Tensor, other: torch.Tensor) -> Any:
    return (input == other).all() if input.shape == other.shape else False


def allclose(*args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.isclose(*args, **kwargs).all()


def is_nonzero(input: torch.Tensor) -> Any:
    return input.reshape(()) != 0


TRUTHS: dict[str, Callable[..., Any]] = {
    "equal": equal,
    "allclose": allclose,
    "is_nonzero": is_nonzero,
}  # functions of torch that answer by a bool, as tensors


class OtherAnswer(Exception):
    """A captured graph is run on inputs that answer otherwise than the example."""


class Otherwise(threading.local):
    """The lines of which it is only noted that they are answered otherwise, and those that were."""

    may: frozenset[str] = frozenset()
    seen: frozenset[str] = frozenset()


OTHERWISE = Otherwise()


@contextmanager
def noting(lines: frozenset[str]) -> Iterator[Otherwise]:
    """Inside, lines that are answered otherwise than the captured graph says are noted as `seen`."""
    OTHERWISE.may, OTHERWISE.seen = lines, frozenset()
    try:
        yield OTHERWISE
    finally:
        OTHERWISE.may = frozenset()


def compare(x: torch.Tensor, expected: list[float], text: str) -> None:
    if x.detach().double().flatten().tolist() == expected:
        return
    if text not in OTHERWISE.may:
        raise OtherAnswer(text)
    OTHERWISE.seen |= {text}


LIBRARY.impl("asked", compare, "CompositeExplicitAutograd")
LIBRARY.impl("asked", lambda x, expected, text: None, "Meta")
ASKED = torch.ops.torch2needle.asked.default
CHECKS: set[Callable] = {ASKED}  # with those of counts.py and sized.py
fx.node.has_side_effect(ASKED)


def refuse_real_numbers(value: Any, text: str) -> None:
    """Python may have those of constants and buffers; those of inputs are others at every call."""
    if isinstance(value, Symbol) and not of_parameters(value.node) and value.spec and value.spec.dtype in FLOATS:
        raise Unsupported(f"no other input answers `{text}` alike; compute with the tensor in place of its number")


class Answers(list[Answer]):
    """Those of one call of a model, in their order."""

    def __init__(self, found: Iterable[Answer] = (), scopes: Scopes | None = None, opened: bool = True) -> None:
        super().__init__(found)
        self.opened = opened
        self.scopes = scopes or Scopes()  # that make plain numbers of tensors

    def noted(self) -> AbstractContextManager:
        """Notes what is asked of tensors."""

        def note(name: str, before: Callable, t: torch.Tensor, frame: FrameType) -> Any:
            if name == "__iter__":
                if t.ndim and t.dtype in WHOLE:
                    self.append(Answer.at(name, frame, t.tolist()))
                return before(t)
            if self.opened and name in ("__float__", "item"):
                self.scopes.add(frame)
            value = before(t)
            self.append(Answer.at(name, frame, value.copy() if name == "numpy" else value))
            return Real.of(value, self.append) if name == "item" and isinstance(value, float) else value

        return intercepted(note)

    def given(self) -> AbstractContextManager:
        """Answers as noted what the same lines ask of the tensors of a capture. Real numbers stay tensors without gradients."""
        from torch.fx.experimental.symbolic_shapes import has_free_unbacked_symbols  # which loads sympy

        left, places = iter(tuple(self)), {a.place for a in self}

        def give(name: str, before: Callable, t: torch.Tensor, frame: FrameType) -> Any:
            real, place = t.is_floating_point(), Answer.at(name, frame, None).place
            if place not in places:  # torch itself asks, too
                return before(t)
            if real and name in (
                "__iter__",
                "numpy",
            ):  # numpy's functions run as torch's where torch.export reads bytecode
                return before(t)
            answer = next((a for a in left if a.place == place), None)
            if answer is None or has_storage(t) or (name == "__iter__" and not has_free_unbacked_symbols(t)):
                return before(t)
            if name == "__iter__":
                ASKED(t, [float(v) for v in tree_leaves(answer.value)], answer.text)
                return iter([torch.tensor(row, dtype=t.dtype, device=t.device) for row in answer.value])
            x = t.detach()
            if name == "item" and real:
                return x
            if name == "__bool__":
                x = x != 0
            elif real and name in ("__int__", "__index__"):
                x = x.trunc().long()
            leaves = answer.value.ravel() if name == "numpy" else tree_leaves(answer.value)
            ASKED(x, [float(v) for v in leaves], answer.text)
            return answer.value.copy() if name == "numpy" else answer.value

        return intercepted(give)


def intercepted(f: Callable[[str, Callable, torch.Tensor, FrameType], Any]) -> AbstractContextManager:
    """`f(name, method, tensor, caller's frame)` in the place of the methods by which Python asks for values, in this thread."""
    thread = threading.get_ident()
    busy = False

    def asked(name: str, before: Callable, t: torch.Tensor) -> Any:
        nonlocal busy
        frame = caller(2)
        name = "item" if name == "tolist" and not t.ndim else name
        busy = True
        try:
            return f(name, before, t, frame)
        finally:
            busy = False

    def elsewhere() -> bool:
        return busy or threading.get_ident() != thread

    def method(owner: type, name: str) -> Callable:
        before = getattr(owner, name)

        def ask(self: torch.Tensor, **how: Any) -> Any:
            return before(self, **how) if elsewhere() else asked(name, functools.partial(before, **how), self)

        return ask

    def comparison(before: Callable, truth: Callable) -> Callable:
        def ask(*args: Any, **kwargs: Any) -> Any:
            if elsewhere():
                return before(*args, **kwargs)
            made = truth(*args, **kwargs)
            return asked("__bool__", bool, made) if isinstance(made, torch.Tensor) else made

        return ask

    owners = [(torch.Tensor, n) for n in NAMES] + [(FakeTensor, n) for n in NAMES if n in vars(FakeTensor)]
    compared = [(o, n, f) for o in (torch, torch.Tensor) for n, f in TRUTHS.items()]
    return patched(
        [(owner, name, method(owner, name)) for owner, name in owners]
        + [(vars(o) if o is torch else o, n, comparison(getattr(o, n), f)) for o, n, f in compared]
    )


def answers(
    model: nn.Module, args: tuple, kwargs: dict[str, Any], training: bool = False, opened: bool = True
) -> Answers:
    """What the model asks of its tensors' values in a call in evaluation mode; training: in the modes that it is in;
    opened: numbers that it makes of tensors stay tensors."""
    found, writes = Answers(opened=opened), Writes()
    with untouched(model), same_chance(), torch.inference_mode(False), inference_without_gradients():
        if not training:
            model.eval()

        def noted() -> None:
            found.clear()
            own_args, own_kwargs = fresh((args, kwargs))  # an undone write leaves what unsqueeze_ does to a shape
            try:
                with plain_conditions(), writes, found.noted(), found.scopes.open():
                    model(*own_args, **own_kwargs)
            finally:
                writes.undo()

        gradients_where_asked(noted)
        if found.scopes.found:  # now with what follows from these numbers
            gradients_where_asked(noted)
    return found


def asks(graph: fx.Graph) -> bool:
    """Whether a captured graph holds checks."""
    return any(n.target in CHECKS for n in graph.nodes)


def asked_of_draws(graph: fx.Graph) -> str:
    """What is asked of random numbers, as against what they leave of activations, in words: no other call answers alike."""
    drawn: set[fx.Node] = set()
    for node in graph.nodes:
        if (draws(node.target) and not drops(node.target)) or any(n in drawn for n in node.all_input_nodes):
            drawn.add(node)
            if node.target is ASKED:
                return (
                    f"`{node.args[2]}` asks random numbers, which answer otherwise at every call; choose by torch.where, set the "
                    "rate of what is left out to 0, or convert the model in evaluation mode"
                )
    return ""


def whether_compiled(answer: Callable[[Callable[[], bool]], bool]) -> AbstractContextManager:
    """Code that is not torch's and asks whether it is compiled gets `answer(torch's own)`, in this thread."""
    thread = threading.get_ident()

    def told(before: Callable[[], bool]) -> Callable[[], bool]:
        @functools.wraps(before)
        def ask() -> bool:
            name = sys._getframe(1).f_globals.get("__name__", "")
            own = name.partition(".")[0] == "torch" or threading.get_ident() != thread
            return before() if own else answer(before)

        return ask

    names = ("is_compiling", "is_dynamo_compiling", "is_exporting")
    return patched([(vars(torch.compiler), n, told(getattr(torch.compiler, n))) for n in names])
