"""torch2needle/tools/archive.py: programs from .pt2 files load and run as torch's own, and nothing in a crafted file runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.export import Dim  # noqa: E402

from archives import ATTACKS, CANARY, rewrite, save_good  # noqa: E402
from torch2needle import models  # noqa: E402
from torch2needle.tools.archive import Unsafe, load_program  # noqa: E402
from torch2needle.tools.command import main  # noqa: E402


class Sizes(nn.Module):
    def forward(self, x: Any, y: Any) -> Any:
        z = nn.functional.interpolate(x, scale_factor=1.5)
        return torch.cat([z[..., : y.shape[-1]], y]).reshape(y.shape[0] * 2, -1), z.mean()


class Regions(nn.Module):
    def forward(self, x: Any, *, d: Any, mode: str = "a (b)") -> Any:
        with torch.no_grad():
            w = x * 2
        return {"out": w + d["q"][0], "none": None}


A = Dim.AUTO
image = {0: A, 2: A, 3: A}
PROGRAMS: dict[str, Callable[[], tuple]] = {
    "unet": lambda: (models.unet(base=2).eval(), (torch.randn(2, 3, 32, 32),), {}, (image,)),
    "sizes": lambda: (Sizes(), (torch.randn(4, 3, 8, 8), torch.randn(4, 3, 12, 9)), {}, (image, image)),
    "regions": lambda: (Regions(), (torch.randn(2, 3),), {"d": {"q": [torch.randn(2, 3)]}}, None),
    "attention": lambda: (
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(),
        (torch.randn(2, 5, 8),),
        {},
        ({0: A, 1: A},),
    ),
    "recurrent": lambda: (nn.LSTM(4, 5, batch_first=True), (torch.randn(2, 5, 4),), {}, ({0: A},)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, args, kwargs, shapes = PROGRAMS[name]()
    torch.export.save(torch.export.export(model, args, kwargs, dynamic_shapes=shapes), tmp_path / "p.pt2")
    program = load_program(str(tmp_path / "p.pt2"))
    want, got = model(*args, **kwargs), program.module()(*args, **kwargs)
    torch.testing.assert_close(got, want)
    assert program.example_inputs is None


@pytest.fixture
def good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    save_good("good.pt2")
    return tmp_path


@pytest.mark.parametrize("name", ATTACKS)
def test_nothing_runs(name: str, good: Path) -> None:
    edits, more, reason = ATTACKS[name]
    rewrite("good.pt2", "bad.pt2", edits, more)
    before = set(sys.modules)
    try:
        load_program("bad.pt2").module()
        said = ""
    except Unsafe as e:
        said = str(e)
    except Exception:
        assert name == "metadata's name"  # damaged, and told by torch
        said = ""
    assert (reason in said) if reason else not said
    assert not Path(CANARY).exists() and "antigravity" not in set(sys.modules) - before


@pytest.mark.parametrize("task", ["check", "convert", "fuse"])
def test_the_command_line_runs_nothing(task: str, good: Path, capsys: Any) -> None:
    rewrite("good.pt2", "bad.pt2", ATTACKS["sample inputs"][0])
    assert main([task, "bad.pt2"]) == 0, capsys.readouterr()
    rewrite("good.pt2", "bad.pt2", ATTACKS["weights"][0])
    capsys.readouterr()
    assert main([task, "bad.pt2"]) == 2
    text = "[model] bad.pt2 holds a pickled object, linear.weight; with --trust it is read all the same, and may run code.\n"
    assert capsys.readouterr() == ("", text) and not Path(CANARY).exists()


def test_trust_is_the_user_s(good: Path, capsys: Any) -> None:
    rewrite("good.pt2", "bad.pt2", ATTACKS["sample inputs"][0])
    assert main(["check", "bad.pt2", "--trust"]) == 0
    assert Path(CANARY).exists()
