"""The kernel table (csrc/kernels): calls by name, dtypes of every operand, one row for all devices."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from needle.backend_ndarray import NDArray, NoKernel, call
from needle.backend_ndarray.kernels import KERNELS, attributes
from test_gpu import ROOT

DTYPES = ["float32", "float64", "int32", "int64", "bool"]


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


@pytest.mark.parametrize("name", KERNELS)
def test_every_dtype_is_taken_or_refused(name: str) -> None:
    """As the first operand; the others have its dtype or one of their own."""
    kernel = KERNELS[name]
    for dtype in DTYPES:
        outs, ins = [dtype] * len(kernel.outputs), [dtype] * len(kernel.inputs)
        if dtype in kernel.dtypes:
            continue  # calls of every dtype that a row takes are test_kernels' and test_ops'
        with pytest.raises((NoKernel, TypeError), match=rf"^\[{name}\] .* {dtype}\.$"):
            kernel.check(outs, ins)


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
