"""Single ops where slopes, ties, NaN or tiny shapes mislead: what `scripts/fuzz --kind gradients` found, and its own checks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fuzzing import frame, gradients
from needle.backend_selection import BACKEND

pytestmark = pytest.mark.skipif(BACKEND == "np", reason="conversion is tested on needle's own arrays")

TABLE: list[tuple[str, list, dict[str, Any], list[tuple]]] = [  # call, args, kwargs, inputs: shape and values
    ("torch.std", ["x0"], {"dim": -1}, [((3, 4), "rows")]),
    ("torch.std", ["x0"], {"correction": 0}, [((), "normal")]),
    ("torch.std", ["x0"], {"dim": 1, "correction": 1}, [((3, 1), "normal")]),
    ("torch.var", ["x0"], {"dim": [0, 1], "keepdim": True}, [((3, 4), "zeros")]),
    ("torch.linalg.vector_norm", ["x0"], {"ord": 0.5}, [((5,), "ties")]),
    ("torch.linalg.vector_norm", ["x0"], {"ord": -1, "dim": 1}, [((5, 3), "ties")]),
    ("torch.norm", ["x0"], {"p": 3, "dim": 0}, [((5, 3), "zeros")]),
    ("torch.pow", ["x0", "x1"], {}, [((4, 5), "zeros"), ((4, 5), "ties")]),
    ("torch.pow", ["x0", "x1"], {}, [((4, 5), "ties"), ((5,), "zeros")]),
    ("torch.maximum", ["x0", "x1"], {}, [((4, 5), "nan"), ((4, 5), "ties")]),
    ("torch.minimum", ["x0", "x1"], {}, [((4, 5), "ties"), ((5,), "nan")]),
    ("torch.fmin", ["x0", "x1"], {}, [((4, 5), "ties"), ((5,), "nan")]),
    ("torch.fmax", ["x0", "x1"], {}, [((), "zeros"), ((), "zeros")]),
    ("torch.clamp", ["x0", "x1"], {}, [((4, 5), "ties"), ((4, 5), "ties")]),
    ("torch.clamp_max", ["x0", "x1"], {}, [((4, 5), "ties"), ((4, 5), "nan")]),
    ("nn.Conv2d", [1, 1, 3], {"padding": 1, "dilation": 2}, [((1, 1, 3, 3), "normal")]),
    ("nn.ConvTranspose2d", [1, 1, 3], {"padding": 1, "dilation": 2}, [((1, 1, 1, 1), "normal")]),
    ("F.interpolate", ["x0"], {"size": 7, "mode": "linear"}, [((2, 3, 7), "nan")]),
    ("F.interpolate", ["x0"], {"size": [5, 9], "mode": "bilinear"}, [((1, 17, 5, 3), "nan")]),
]


def case(call: str, args: list, kwargs: dict[str, Any], inputs: list[tuple], layout: str = "plain") -> gradients.Case:
    laid_out = [(shape, values, layout) for shape, values in inputs]
    whole = {"call": call, "args": args, "kwargs": kwargs, "inputs": laid_out, "results": 0}
    return {**whole, "train": layout != "plain", "compiled": True}


@pytest.mark.parametrize("layout", ["plain", "sliced"])
@pytest.mark.parametrize("row", TABLE, ids=lambda r: f"{r[0]}-{'-'.join(v for _, v in r[3])}")
def test_corner(row: tuple, layout: str) -> None:
    assert frame.run_case(gradients, case(*row, layout)).startswith("agrees")


def test_a_few_drawn_cases() -> None:
    found = frame.search("gradients", 0, 40, jobs=1)
    assert not found.failures
    assert sum(n for how, n in found.outcomes.items() if how.startswith("agrees")) > 20


@pytest.mark.parametrize(
    ("got", "why"),
    [
        (np.array([1, 2, 3], "float32"), ""),
        (np.array([1, 2, 3.1], "float32"), "off by"),
        (np.array([1, np.nan, 3], "float32"), "nan where torch has 2.0"),
        (np.array([1, 2], "float32"), "shape"),
        (np.array([1, 2, 3], "float64"), "float64, torch's is float32"),
    ],
)
def test_what_the_judge_calls_wrong(got: np.ndarray, why: str) -> None:
    exact = np.array([1, 2, 3.0])
    if not why:
        return gradients.compare("it", got, exact, exact.astype("float32"))
    with pytest.raises(frame.Wrong, match=why):
        gradients.compare("it", got, exact, exact.astype("float32"))


def test_smaller_cases_have_less_in_them() -> None:
    start = gradients.draw(__import__("random").Random(5))
    assert all(smaller != start for smaller in gradients.smaller(start))
