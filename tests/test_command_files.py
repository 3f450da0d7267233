"""The command line given files of other kinds: one sentence, which says what the file is and what takes it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import save_file  # noqa: E402

import needle as ndl  # noqa: E402
import torch2needle  # noqa: E402
from needle.backend_selection import BACKEND  # noqa: E402
from torch2needle.tools.command import main  # noqa: E402

pytestmark = pytest.mark.skipif(BACKEND == "np", reason="most tasks compile")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


KINDS = {
    "n.ndlc": "a plan that was exported for libneedle.so",
    "w.pt": "what torch.save wrote, which --weights takes",
    "w.safetensors": "tensors without a graph, which --weights takes",
    "s.pt": "TorchScript",
    "a.npy": "an array, which --input of run takes",
    "a.npz": "arrays in one file; run takes each as a .npy file",
    "program": "a program of torch.export.save, which convert takes by a name that ends in .pt2",
    "n.onnx": "an ONNX file, which needle writes and does not read",
}


def test_every_command_says_what_another_file_is(folder: Path, capsys: Any) -> None:
    model, x = torch.nn.Linear(2, 2).eval(), torch.ones(1, 2)
    net = torch2needle.convert(model, (x,))
    ndl.save(net, "n.needle")
    ndl.compile(net, (x,)).export("n.ndlc")
    torch.save(model.state_dict(), "w.pt")
    save_file(model.state_dict(), "w.safetensors")
    torch.jit.trace(model, x).save("s.pt")
    np.save("a.npy", x.numpy()), np.savez("a.npz", x.numpy())
    torch.export.save(torch.export.export(model, (x,)), "program.pt2")
    os.rename("program.pt2", "program")
    Path("n.onnx").write_bytes(b"")
    linear = ("torch.nn:Linear", "--args", "[2, 2]")
    for file, kind in KINDS.items():
        commands = [("run", file), *((task, file, "--input", "1x2") for task in ("convert", "check", "export", "fuse"))]
        if not kind.endswith("which --weights takes"):
            commands.append(("convert", *linear, "--weights", file))
        for command in (*commands, ("verify", *linear, "--input", "1x2", "--net", file)):
            assert main(command) == 2
            said = capsys.readouterr().err
            assert said.count("\n") == 1 and f"got the file {file}: {kind}" in said, (command, said)
    assert main(["convert", *linear, "--weights", "n.needle"]) == 0  # by what it holds, not by its name
    assert (ndl.load("Linear.needle").state_dict()["weight"].numpy() == model.weight.detach().numpy()).all()


@pytest.mark.parametrize("option", ["--weights", "--net"])
def test_an_empty_file_name_is_not_left_out(folder: Path, capsys: Any, option: str) -> None:
    with pytest.raises(SystemExit) as e:
        main(["verify", "torch.nn:Linear", "--args", "[2, 2]", "--input", "1x2", option, ""])
    said = capsys.readouterr().err
    assert e.value.code == 2 and f"argument {option}: expects the name of a file, got an empty one" in said
