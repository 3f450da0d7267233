"""Writes through views: later readers see them, under torch.fx and torch.export, or they are refused; which results are views."""

# ruff: noqa: PLC3002 (its tables of models are one-line lambdas)
from __future__ import annotations

import itertools
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402

import needle as ndl  # noqa: E402
import torch2needle  # noqa: E402
from conversion import close, leaves  # noqa: E402
from test_structure import MATRIX, model  # noqa: E402
from torch2needle.rules.registry import FUNCTION_RULES, is_inplace, target_name  # noqa: E402


def seen(write: Any) -> Any:
    """A forward that makes y and views of it, writes by `write(self, y, x)`, and returns all that `write` gives and y."""

    def forward(self: Any, x: Any) -> Any:
        y = self.fc(x)
        top, turned = y[:1], y.t()
        made = write(self, y, x)
        return made, y * 1, top + 0, turned * 2

    return forward


VIEWS: dict[str, Any] = {  # the write, and why it is refused without an example, if it is
    "reshape of a view": (lambda self, y, x: y[:, :4].reshape(-1).add_(1), "may not share|through a view"),
    "view of a reshape": (lambda self, y, x: y.reshape(2, -1)[0].mul_(2), "through a view"),
    "a part of a flattened one": (lambda self, y, x: y.flatten()[3:5].fill_(7), "through a view"),
    "index of a list": (lambda self, y, x: y[[0, 1]].add_(1), ""),
    "index of a tensor": (lambda self, y, x: y[torch.tensor([2, 0])].zero_(), ""),
    "index of a mask": (lambda self, y, x: y[torch.tensor([True, False, True])].zero_(), ""),
    "index of one number": (lambda self, y, x: y[torch.tensor(1)].zero_(), "through a view"),
    "bool": (lambda self, y, x: y[True].zero_(), "got bool"),
    "slices with a new axis": (lambda self, y, x: y[None, 1:, ::2].mul_(3), ""),
    "unsqueeze_": (lambda self, y, x: (lambda c: (c.unsqueeze_(0), c.add_(1), c)[2])(y[1:]), ""),
    "squeeze_": (lambda self, y, x: (lambda c: (c.squeeze_(), c.add_(1), c)[2])(y[:1]), ""),
    "t_": (lambda self, y, x: (lambda c: (c.t_(), c[0].add_(1), c)[2])(y.view(8, 3)), ""),
    "transpose_ of the whole": (lambda self, y, x: (y.transpose_(0, 1), y.add_(x.t()), y[0])[2], ""),
    "swapaxes_": (lambda self, y, x: y[:, 2:4].swapaxes_(0, 1).add_(1), ""),
    "unsqueeze_ of what may be another": (lambda self, y, x: y.contiguous().unsqueeze_(0), "second name"),
    "data": (lambda self, y, x: y.data.add_(1), "gradients"),
    "detach": (lambda self, y, x: y.detach().add_(1), "pass example"),
    "T": (lambda self, y, x: y.T[0].fill_(2), ""),
    "mT": (lambda self, y, x: y.view(3, 2, 4).mT.add_(1), ""),
    "expand": (lambda self, y, x: y.expand(2, 3, 8)[0].add_(1), "share memory with each other"),
    "expand_as": (lambda self, y, x: y[:1].expand_as(x)[0].add_(1), "share memory with each other"),
    "diagonal": (lambda self, y, x: y.diagonal().add_(1), ""),
    "chunk": (lambda self, y, x: y.chunk(2, 1)[1].add_(1), ""),
    "one piece twice": (lambda self, y, x: (lambda p: (p[1].unsqueeze_(0), p[1].add_(1), p[1])[2])(y.chunk(2, 1)), ""),
    "pieces with a new shape": (
        lambda self, y, x: (lambda p: (p[0].unsqueeze_(1), p[0].add_(1), p)[2])(y.chunk(2, 1)),
        "",
    ),
    "named results": (lambda self, y, x: (lambda s: (s.values.t_(), s[0].add_(1), s)[2])(y.sort(1)), ""),
    "limits": (lambda self, y, x: (lambda m: (m[1].unsqueeze_(0), m.max - m.min, m)[1:])(y.aminmax(dim=1)), ""),
    "split and unbind": (lambda self, y, x: y.split((3, 5), 1)[0].select(1, 0).add_(1), ""),
    "positive": (lambda self, y, x: (+y).add_(1), ""),
    "cpu": (lambda self, y, x: y.cpu().add_(1), ""),
    "float": (lambda self, y, x: y.float().add_(1), "through a view"),
    "type_as": (lambda self, y, x: y.type_as(x).add_(1), "through a view"),
    "einsum": (lambda self, y, x: torch.einsum("ij->ji", y).add_(1), "through a view"),
    "comparison": (lambda self, y, x: y.gt_(0), "no rule"),
    "integers": (lambda self, y, x: (lambda i: (i.mul_(2), i)[1])(x.long()), ""),
    "doubles": (lambda self, y, x: y.add_(x.double()), ""),
    "out": (lambda self, y, x: torch.add(x, 1, out=y), "out="),
    "addition at an index": (lambda self, y, x: y.__setitem__((slice(None), [0, 2]), 5.0), ""),
    "dropout": (lambda self, y, x: F.dropout(y, 0.0, False).add_(1), "through a view"),
}


@pytest.mark.parametrize("name", VIEWS)
def test_later_readers_see_a_write_or_it_is_refused(name: str) -> None:
    write, reason = VIEWS[name]
    theirs = model(seen(write)).eval()
    x = torch.randn(MATRIX)
    if reason:
        with pytest.raises(torch2needle.ConversionError, match=reason):
            torch2needle.convert(theirs)
    else:
        ours = torch2needle.convert(theirs)
        with torch.no_grad():
            want = theirs(x)
        close(ours(x), want)
        assert [str(t.dtype)[6:] for t in leaves(want)] == [t.dtype for t in leaves(ours(x))]
        close(ndl.compile(ours, (x,))(x), want)


EXPORT = {"index of a mask", "integers", "cpu"}  # have no rule there, or one without strides


@pytest.mark.parametrize("name", [k for k in VIEWS if k not in ("data", "index of one number")])  # torch refuses those
def test_writes_under_export(name: str) -> None:
    """Strides and dtypes are known there: what torch.fx has to refuse may convert, and is then right."""
    theirs = model(seen(VIEWS[name][0])).eval()
    x = torch.randn(MATRIX)
    with torch.no_grad():
        want = theirs(x)
        program = torch.export.export(theirs, (x,), strict=False)
    try:
        ours = torch2needle.convert(program)
    except torch2needle.ConversionError as e:
        assert VIEWS[name][1] or name in EXPORT, e
    else:
        close(ours(x), want)


TRIED: tuple[tuple, ...] = (  # arguments after the first, with which most functions take some of the tensors below
    *(
        (),
        (0,),
        (1,),
        (2,),
        (0, 1),
        (1, 1),
        (2, 0),
        (0, 0, 1),
        (0, 1, 2),
        (1, 2, 1),
        (1, 1, 1),
        (2, 3, 4),
        (0, 0, 2, 1),
    ),
    *(((2, 3, 4),), ((-1,),), ((6, 4),), ((0, 1, 2),), ((1, 2), 1), (0, (1, 3)), (1, (3, 1)), ((0, 0),), ((1,), (2,))),
    *((0.5, False), (0.5,), (0.0,), ("T",), ("mT",), ("data",), (None,), (slice(0, 1),), ((..., 0),), ([0, 1],)),
    *((torch.float32,), (torch.int64,), (torch.contiguous_format,), (torch.tensor([0]),), (torch.ones(2, 3, 4),)),
)
TENSORS = (
    lambda: torch.randn(2, 3, 4),
    lambda: torch.randn(4, 3, 2).transpose(0, 2),
    lambda: torch.randn(5),
    lambda: torch.randn(4, 4),
    lambda: torch.randn(1, 3, 4, 4),
    lambda: torch.randint(0, 2, (2, 3)),
)


def takes(target: Any, count: int) -> bool:
    """False where an overload's schema shows that it cannot take so many arguments: failing calls are most of the time."""
    if not isinstance(target, torch._ops.OpOverload):
        return True
    positional = [a for a in target._schema.arguments if not a.kwarg_only]
    return sum(not a.has_default_value() for a in positional) <= count <= len(positional)


@pytest.mark.filterwarnings("ignore")
def test_rules_say_what_shares_memory() -> None:
    """Every function that has a rule, tried with many arguments: does its result lie in the memory of its first argument?"""
    wrong, tried = set(), 0
    for target, rule in FUNCTION_RULES.items():
        if isinstance(target, str) or is_inplace(target):
            continue
        fitting = [arguments for arguments in TRIED if takes(target, 1 + len(arguments))]
        for make, arguments in itertools.product(TENSORS, fitting):
            t = make()
            try:
                result = target(t, *arguments)
            except Exception:
                continue
            if not leaves(result) or t._version:
                continue
            tried += 1
            shares = {r.untyped_storage()._cdata == t.untyped_storage()._cdata for r in leaves(result)}
            view = getattr(rule, "view", None)
            view = view(t, *arguments) if callable(view) else view
            if (view is None and True in shares) or (view in ("always", "same") and False in shares):
                wrong.add(target_name(target))
    assert tried > 5000
    assert wrong <= {"operator.getitem"}  # which asks for needle's tensors among its indices
