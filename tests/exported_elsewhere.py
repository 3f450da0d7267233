"""A model exported on one machine and run on another (scripts/aarch64): `write FOLDER` there, `run FOLDER` here.

Plans of the ISA `scalar` run on every processor with the same byte order; those of an ISA that is not here are refused.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

import needle as ndl
from c_library import Failed, Model
from test_executor import image, small_net


def write(folder: Path) -> None:
    x = image(2, 3, 33, 18)
    exe = ndl.compile(small_net(20), (x,))
    exe.export(folder / "model.ndlc", isas=("scalar",))
    exe.export(folder / "best.ndlc")
    maps, scores = exe(x)
    np.savez(folder / "want.npz", isa=ndl.isa(), x=x, maps=maps, scores=scores)


def run(folder: Path) -> None:
    want = np.load(folder / "want.npz")
    model = Model(folder / "model.ndlc")
    assert model.isa == "scalar"
    for got, name in zip(model(want["x"]), ("maps", "scores"), strict=True):
        assert np.abs(got - want[name]).max() <= 1e-5 * np.abs(want[name]).max()
    try:
        Model(folder / "best.ndlc")
    except Failed as refused:
        print(f"what {want['isa']} computed is what scalar plans give here; {refused}")
    else:
        assert want["isa"] in ("scalar", ndl.isa())


if __name__ == "__main__":
    {"write": write, "run": run}[sys.argv[1]](Path(sys.argv[2]))
