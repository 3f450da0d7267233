"""The kernel table (csrc/kernels): calls by name, dtypes of every operand, one row for all devices."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import needle as ndl
from needle.backend_ndarray import NDArray, NoKernel, call
from needle.backend_ndarray.kernels import KERNELS, attributes
from test_gpu import ROOT


def arrays() -> dict[str, Any]:
    return {n: NDArray(np.ones((3, 3), "float32")) for n in ("a", "b")}


GIVEN: dict[str, Any] = {"bias": None, "activation": 0, "alpha": 0}
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "an input left out": ({"b": None}, "b is missing"),
    "an attribute left out": ({"alpha": ...}, "attribute alpha is missing"),
    "another input": ({"bais": None}, "takes no 'bais'"),
    "another attribute": ({"beta": 1}, "takes no 'beta'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_names(case: str) -> None:
    change, text = WRONG[case]
    named = {n: v for n, v in (arrays() | GIVEN | change).items() if v is not ...}
    with pytest.raises(ValueError, match=rf"^\[matmul\] {text}\.$"):
        call("matmul", [NDArray.empty((3, 3))], **named)


def test_the_order_of_names_is_free() -> None:
    out = NDArray.empty((3, 3))
    call("matmul", [out], **dict(reversed([*arrays().items(), *GIVEN.items()])))
    assert (out.numpy() == 3).all()
    assert attributes("matmul", alpha=0.5, activation=1) == (1, 0.5)
    with pytest.raises(ValueError, match=r"^\[matmul\] expects the attributes activation, alpha, got alpha\.$"):
        attributes("matmul", alpha=0.5)


LETTERS = dict(re.findall(r"DTYPE\(.*'(.)', \"(\w+)\"", (ROOT / "csrc/kernels/dtypes.def").read_text()))
TABLE = """
#define IN(name, ...) (#name, "" __VA_ARGS__),
#define OPTIONAL IN
#define OUT IN
#define INT(name) #name " "
#define REAL INT
#define MAP(name, inputs, attrs) (#name, 1, [inputs], [OUT(y, "*")], attrs),
#define KERNEL(name, devices, inputs, outputs, ...) (#name, 1, [inputs], [outputs], "" __VA_ARGS__),
#define GROUPS(name, devices, inputs, outputs, ...) (#name, 2, [inputs], [outputs], "" __VA_ARGS__),
#include "kernels/kernels.def"
"""
# Shapes of the operands of a row of several dtypes are (2, 2, 2, 2), attributes 1, except for these.
SIZES = dict.fromkeys(("batch_norm", "batch_norm_train", "batch_norm_train_grad"), (2, 2, 2))
OUTPUTS = dict.fromkeys(("sum", "mean", "max", "min", "argmax"), (1, 2, 2, 2))
OPERANDS = {
    "cross_entropy_columns": [(2, 2, 2), (2, 2), (2, 2)],
    "cross_entropy_columns_grad": [(2, 2, 2), (2, 2), (2, 2), (2, 2, 2)],
    "resample": [(2, 2, 2, 2), (2,), (1, 2), (2, 2, 2, 2)],
}
ATTRIBUTES = dict.fromkeys(
    ("activation", "axis", "pad_top", "pad_left", "pad_bottom", "pad_right", "skip", "check"), 0
) | {"slots": 8}


class Row:
    """A row of kernels.def, of two groups where it takes any number, and calls of it whose operands are full of ones."""

    def __init__(self, name: str, groups: int, inputs: list, outputs: list, attrs: str):
        self.name, self.inputs = name, len(inputs) * groups
        self.attrs = [ATTRIBUTES.get(a, 0.5 if a.startswith("beta") else 1) for a in attrs.split()]
        # The dtypes that each lists, inputs first; none: the dtype of the first, as in further groups.
        texts = [[text for _, text in o] + [""] * len(o) * (groups - 1) for o in (inputs, outputs)]
        self.listed = [[d for k, d in LETTERS.items() if k in t or t == "*"] for t in texts[0] + texts[1]]

    def cases(self) -> Iterator[tuple[list[str], bool]]:
        """Every operand with every dtype, beside every dtype of the first one: dtypes of all, and whether the row takes them."""
        for k, listed in enumerate(self.listed):
            for first in self.listed[0] if k else LETTERS.values():
                own = [first if not d or first in d else d[0] for d in self.listed]
                for dtype in LETTERS.values() if k else [first]:
                    yield [*own[:k], dtype, *own[k + 1 :]], dtype in (listed or [first])

    def arrays(self, dtypes: list[str], device: Any) -> tuple[list[NDArray], list[NDArray]]:
        size = SIZES.get(self.name, (2, 2, 2, 2))
        shapes = [size] * self.inputs + [OUTPUTS.get(self.name, size)] * (len(dtypes) - self.inputs)
        shapes = OPERANDS.get(self.name, shapes)
        made = [NDArray(np.ones(s), device, d) for s, d in zip(shapes, dtypes, strict=True)]
        return made[self.inputs :], made[: self.inputs]


def rows() -> dict[str, Row]:
    command = ["g++", "-E", "-P", "-xc++", f"-I{ROOT / 'csrc'}", "-"]
    done = subprocess.run(command, input=TABLE, capture_output=True, text=True, check=True)
    return {name: Row(name, *others) for name, *others in ast.literal_eval(f"[{done.stdout}]")}


ROWS = rows()


def check_dtypes(row: Row, device: Any) -> None:
    """Dtypes that a row takes give what its first ones give; others are refused in a sentence, and nothing is written."""
    kernel, wanted = device.kernels[row.name], None
    several = sum(taken for _, taken in row.cases()) > len(row.listed)  # else every call would be the same
    for dtypes, taken in row.cases():
        if taken and not several:
            continue
        outs, ins = row.arrays(dtypes, device)
        refs = [[a._ref for a in arrays] for arrays in (outs, ins)]
        if taken:
            kernel(*refs, row.attrs)
            got = [a.numpy() for a in outs]
            wanted = wanted or got
            for a, b in zip(got, wanted, strict=True):
                known = np.isfinite(b.astype(float))  # what others become as integers is the device's choice
                a, b = a[known], b[known]
                np.testing.assert_allclose(
                    a.astype(float), b.astype(a.dtype).astype(float), rtol=1e-5, atol=1e-6, err_msg=row.name
                )
            continue
        names = [[a.dtype for a in arrays] for arrays in (outs, ins)]
        for refused in (partial(kernel.check, *names), partial(kernel, *refs, row.attrs)):
            with pytest.raises((NoKernel, TypeError), match=rf"^\[{row.name}\] [^\n]* ({'|'.join(set(dtypes))})\.$"):
                refused()
        assert all((a.numpy() == 1).all() for a in outs)


@pytest.mark.parametrize("name", KERNELS)
def test_every_operand_with_every_dtype(name: str) -> None:
    check_dtypes(ROWS[name], ndl.cpu())


def test_every_operand_with_every_dtype_on_gpus(gpu: Any) -> None:
    for name in gpu.kernels:
        check_dtypes(ROWS[name], gpu)


SOURCE = """
#include "kernels/rows.h"
int64_t f(const needle::conv2d_args& c) { return %s; }
needle::matmul_args::Attr attributes() { return {%s}; }
"""


@pytest.mark.parametrize(
    ("expression", "attrs", "compiles"),
    [
        ("c.attr.stride_h + c.in.bias.rank + c.out.y.rank", ".activation = 1, .alpha = 0.5", True),
        ("c.attr.stride", "", False),
        ("c.in.residual.rank", "", False),
        ("0", ".alpha = 0.5, .activation = 1", False),
        ("0", ".activation = 1, .beta = 0.5", False),
    ],
)
def test_names_in_cpp(expression: str, attrs: str, compiles: bool, tmp_path: Path) -> None:
    source = tmp_path / "source.cpp"
    source.write_text(SOURCE % (expression, attrs))
    command = ["g++", "-std=c++20", "-fsyntax-only", f"-I{ROOT / 'csrc'}", source]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode == 0) == compiles, done.stderr


@pytest.mark.parametrize("given", [(), ("weight",), ("bias",), ("weight", "bias")], ids=str)
def test_inputs_that_may_be_absent(given: tuple[str, ...]) -> None:
    """Each without the other: a null view takes no place of another input."""
    rng = np.random.default_rng(0)
    x, w, b = (rng.standard_normal(s).astype("float32") for s in ((3, 17), 17, 17))
    values = {n: NDArray(v) if n in given else None for n, v in (("weight", w), ("bias", b))}
    outs = [NDArray.empty((3, 17)), NDArray.empty((3,)), NDArray.empty((3,))]
    call("layer_norm", outs, x=NDArray(x), eps=0.0, **values)
    want = (x - x.mean(1, keepdims=True)) / x.std(1, keepdims=True)
    want = want * (w if "weight" in given else 1) + (b if "bias" in given else 0)
    np.testing.assert_allclose(outs[0].numpy(), want, atol=1e-5)
