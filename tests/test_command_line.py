"""The command line: every subcommand as a user runs it, exit codes, and one sentence for what is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import save_file  # noqa: E402

import needle as ndl  # noqa: E402
from named_nets import NETS  # noqa: E402
from needle.backend_selection import BACKEND  # noqa: E402
from torch2needle import models  # noqa: E402
from torch2needle.tools.command import BUILT_IN, main  # noqa: E402

pytestmark = pytest.mark.skipif(BACKEND == "np", reason="most tasks compile")

OWN_NETS = """
class Bad(nn.Module):
    def forward(self, x):
        return torch.special.i0(x) + torch.special.i1(x)

class Two(nn.Module):
    def forward(self, x, ids, mask):
        return torch.where(mask, x, x + ids)

def fails():
    raise RuntimeError("no such checkpoint")

number = 3
ready = Net(2)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "command_nets.py").write_text(NETS + OWN_NETS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("command_nets", None)
    return tmp_path


def run(folder: Path, *args: str) -> tuple[int, str, str]:
    """Exit code, output and errors of a process of its own, which finds the models in its current folder."""
    root = Path(sys.modules["torch2needle"].__file__ or "").parents[1]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), str(root)])}
    done = subprocess.run(
        [sys.executable, "-m", "torch2needle", *args], cwd=folder, env=env, capture_output=True, text=True, timeout=120
    )
    return done.returncode, done.stdout, done.stderr


def test_every_subcommand_as_a_process(folder: Path) -> None:
    code, out, err = run(
        folder, "convert", "command_nets:Net", "--kwargs", '{"width": 6}', "--fuse", "-o", "net.needle"
    )
    assert (code, err) == (0, "") and out.startswith("net.needle: 1 calls, 180 parameters, ")
    shape = ("--input", "2x3x8x9")
    kwargs = ("--args", "[6]")
    code, out, err = run(folder, "verify", "command_nets:Net", *kwargs, *shape, "--net", "net.needle")
    assert (code, err) == (0, "") and "needle agrees with torch" in out and "compiled  output  (2, 6, 6, 7)" in out
    code, out, err = run(folder, "check", "command_nets:Bad", "--json")
    report = json.loads(out)
    assert (code, err) == (1, "") and not report["ok"] and len(report["rows"]) == 3
    code, out, err = run(
        folder, "profile", "net.needle", *shape, "--html", "p.html", "--trace", "t.json", "--rounds", "2"
    )
    assert (code, err) == (0, "") and out.endswith("wrote p.html\nwrote t.json\n")
    assert json.loads((folder / "t.json").read_text()) and "<html" in (folder / "p.html").read_text()
    code, out, err = run(folder, "export", "net.needle", *shape)
    assert (code, err) == (0, "") and out.startswith("net.ndlc: 3 steps, arena ")
    assert (folder / "net.ndlc").read_bytes().startswith(b"\x89ndlc")
    code, out, err = run(folder, "fuse", "command_nets:Net", "--dry-run")
    assert (code, err) == (0, "") and out.startswith("1 fusions would apply, 3 -> 1 calls")


def test_help(capsys: Any) -> None:
    for args in ([], ["convert"], ["export"], ["check"], ["verify"], ["profile"], ["fuse"]):
        with pytest.raises(SystemExit) as e:
            main([*args, "--help"])
        text = capsys.readouterr().out
        assert e.value.code == 0 and "examples:\n  torch2needle check resnet18 --input 1x3x224x224\n" in text
        assert "exit codes: 0 fine, 1 not wholly convertible or no match, 2 bad usage" in text


def test_the_installed_command_is_declared() -> None:
    pyproject = Path(__file__).parents[1] / "pyproject.toml"
    assert '[project.scripts]\ntorch2needle = "torch2needle.tools.command:main"\n' in pyproject.read_text()


# -- convert and weights -------------------------------------------------------------------------------------------------


def test_weights_of_both_kinds(folder: Path, capsys: Any) -> None:
    from command_nets import Net  # type: ignore[import-not-found]

    model = Net(5)
    torch.save(model.state_dict(), "w.pt")
    save_file(model.state_dict(), "w.safetensors")
    for file in ("w.pt", "w.safetensors"):
        assert main(["convert", "command_nets:Net", "--args", "[5]", "--weights", file]) == 0
        net = ndl.load("Net.needle")
        assert (net.state_dict()["conv.weight"].numpy() == model.conv.weight.detach().numpy()).all()
    capsys.readouterr()
    assert main(["convert", "command_nets:Net", "--weights", "w.pt"]) == 2
    assert capsys.readouterr().err.startswith("[weights] w.pt does not fit: Error(s) in loading state_dict")


class Evil:
    def __reduce__(self) -> Any:
        return (os.mkdir, ("ran",))


def test_weights_run_no_code(folder: Path, capsys: Any) -> None:
    torch.save({"a": Evil()}, "evil.pt")
    assert main(["convert", "command_nets:Net", "--weights", "evil.pt"]) == 2
    assert not Path("ran").exists() and "[weights] evil.pt does not fit" in capsys.readouterr().err


def test_a_seed_gives_the_same_weights(folder: Path) -> None:
    for seed, file in (("1", "a"), ("1", "b"), ("2", "c")):
        assert main(["convert", "command_nets:Net", "--seed", seed, "-o", file]) == 0
    a, b, c = (ndl.load(f).state_dict()["conv.weight"].numpy() for f in "abc")
    assert (a == b).all() and not (a == c).any()


def test_a_ready_model_and_a_built_in_one(folder: Path, capsys: Any) -> None:
    assert main(["check", "command_nets:ready"]) == 0
    assert main(["check", "mlp", "--input", "1x784"]) == 0
    assert "torch.nn.Linear" in capsys.readouterr().out


# -- inputs --------------------------------------------------------------------------------------------------------------


def test_inputs_by_position_and_name(folder: Path, capsys: Any) -> None:
    several = (["2x3", "3:int64", "2x3:bool"], ["mask=2x3:bool", "x=2x3", "ids=scalar:int64"])
    for texts in several:
        inputs = [a for t in texts for a in ("--input", t)]
        assert main(["verify", "command_nets:Two", *inputs]) == 0, capsys.readouterr()
        assert main(["profile", "command_nets:Two", *inputs, "--rounds", "1", "--eager"]) == 0, capsys.readouterr()


# -- exit codes ----------------------------------------------------------------------------------------------------------

IMAGE = ("--input", "1x3x6x6")
WRONG: dict[str, tuple[tuple[str, ...], int, str]] = {
    "not convertible": (("convert", "command_nets:Bad"), 1, "[convert] expects operations with rules, got 2 calls"),
    "check": (("check", "command_nets:Bad"), 1, ""),
    "other weights": (("verify", "command_nets:Net", *IMAGE, "--seed", "3", "--net", "net.needle"), 1, ""),
    "no such name": (
        ("check", "resnet19"),
        2,
        "[model] expects package.module:callable, a file that exists, or one of",
    ),
    "no such module": (
        ("check", "no_such_module:f"),
        2,
        "[model] cannot import no_such_module:f: ModuleNotFoundError:",
    ),
    "no such callable": (("check", "command_nets:nothing"), 2, "[model] cannot import command_nets:nothing: Attribute"),
    "no module": (("check", "command_nets:number"), 2, "[model] command_nets:number failed: TypeError:"),
    "not a model": (("check", "builtins:dict"), 2, "[model] expects builtins:dict to give an nn.Module, got dict."),
    "fails": (
        ("check", "command_nets:fails"),
        2,
        "[model] command_nets:fails failed: RuntimeError: no such checkpoint.",
    ),
    "arguments": (("check", "command_nets:Net", "--args", "[1,2,3]"), 2, "[model] command_nets:Net failed: TypeError:"),
    "no weights": (("check", "command_nets:Net", "--weights", "none.pt"), 2, "[weights] there is no file none.pt."),
    "no net": (("verify", "command_nets:Net", *IMAGE, "--net", "none"), 2, "[load] there is no file none."),
    "foreign net": (("profile", "command_nets.py", *IMAGE), 2, "[load] command_nets.py is not a complete safetensors"),
    "foreign pt2": (("check", "none.pt2"), 2, "[model] there is no file none.pt2."),
    "check a file": (("check", "net.needle"), 2, "[model] check expects a torch model, got the file net.needle."),
    "weights twice": (("fuse", "net.needle", "--weights", "w.pt"), 2, "[model] a needle file holds its weights"),
    "inputs": (("profile", "net.needle", "--input", "1x4x6x6"), 2, "[profile] the model does not run on these inputs:"),
    "export to nowhere": (
        ("export", "net.needle", *IMAGE, "-o", "no/x"),
        2,
        "[export] cannot write no/x: No such file",
    ),
    "export for none": (
        ("export", "net.needle", *IMAGE, "--isa", "mmx"),
        2,
        "[export] no plan for mmx: [needle] NEEDLE",
    ),
    "names": (("check", "command_nets:Two", "--input", "x=3", "--input", "3"), 2, "[input] expects a name of its own"),
    "pattern": (("fuse", "command_nets:Net", "--disable", "no"), 2, "[fuse] a pattern expects a registered name"),
    "output": (("convert", "command_nets:Net", "-o", "no/such/folder"), 2, "[save] cannot write no/such/folder:"),
    "output is a folder": (("convert", "command_nets:Net", "-o", "folder"), 2, "[save] cannot write folder:"),
    "shape": (
        ("verify", "command_nets:Net", "--input", "1x4x6x6"),
        2,
        "[input] the model does not run on these inputs: RuntimeError: Given groups=1",
    ),
    "shape, checked": (("check", "command_nets:Net", "--input", "1x4x6x6"), 2, "[input] the model does not run"),
    "shape, converted": (("convert", "command_nets:Net", "--input", "1x4x6x6"), 2, "[input] the model does not run"),
    "dtype": (("verify", "command_nets:Net", "--input", "1x3x6x6:int64"), 2, "[input] the model does not run"),
    "unknown name": (("verify", "command_nets:Net", "--input", "y=1x3x6x6"), 2, "[input] the model does not run"),
    "one too many": (("verify", "command_nets:Net", *IMAGE, *IMAGE), 2, "[input] the model does not run"),
    "no weights fit": (
        ("verify", "command_nets:NoWeights", *IMAGE, "--weights", "empty"),
        2,
        "[weights] empty does not",
    ),
    "empty program": (("check", "empty.pt2"), 2, "[model] cannot read empty.pt2: PytorchStreamReader failed"),
    "empty net": (("profile", "empty", *IMAGE), 2, "[load] empty is not a complete safetensors file"),
    "broken module": (("check", "broken_nets:f"), 2, "[model] cannot import broken_nets:f: SyntaxError:"),
    "endless": (("check", "command_nets:deep"), 2, "[model] command_nets:deep failed: RecursionError:"),
    "quits": (("check", "command_nets:quits"), 2, "[model] command_nets:quits failed: SystemExit: 3."),
}


@pytest.mark.parametrize("name", WRONG)
def test_exit_codes(name: str, folder: Path, capsys: Any) -> None:
    args, code, text = WRONG[name]
    (folder / "empty").touch(), (folder / "empty.pt2").touch(), (folder / "folder").mkdir()
    (folder / "broken_nets.py").write_text("def f(:")
    assert main(["convert", "command_nets:Net", "-o", "net.needle"]) == 0
    capsys.readouterr()
    assert main(args) == code
    out, err = capsys.readouterr()
    assert err.startswith(text) and (bool(err) == bool(text)) and "Traceback" not in out + err
    if code == 2:
        assert err.count("\n") == 1 and err.endswith(".\n")


USAGE = {
    "no task": ([], "expected one argument|required"),
    "no model": (["check"], "required: MODEL"),
    "no input": (["verify", "mlp"], "required: --input"),
    "shape": (["check", "mlp", "--input", "1,2"], "expects [name=]1x3x224x224[:dtype]"),
    "dtype": (["check", "mlp", "--input", "1x2:float8"], "expects [name=]1x3x224x224[:dtype]"),
    "json": (["check", "mlp", "--kwargs", "{width:1}"], "expects JSON"),
    "memory": (["verify", "mlp", "--input", "99999999999999x3"], "expects what fits into the"),
    "rank": (["check", "mlp", "--input", "x".join("1" * 17)], "expects [name=]1x3x224x224[:dtype]"),
    "digits": (["check", "mlp", "--input", "9" * 19], "expects [name=]1x3x224x224[:dtype]"),
    "seed": (["check", "mlp", "--seed", "-1"], "expects a whole number of at least 0"),
    "rounds": (["profile", "mlp", "--input", "1", "--rounds", "0"], "expects a whole number of at least 1"),
    "deep json": (["check", "mlp", "--args", "[" * 100_000], "expects JSON"),
    "array": (["check", "mlp", "--kwargs", "[1]"], "expects a JSON object"),
    "dry run": (["fuse", "mlp", "--dry-run", "-o", "x"], "--dry-run writes nothing"),
}


@pytest.mark.parametrize("name", USAGE)
def test_usage(name: str, capsys: Any) -> None:
    args, text = USAGE[name]
    with pytest.raises(SystemExit) as e:
        main(args)
    err = capsys.readouterr().err
    assert e.value.code == 2 and any(t in err for t in text.split("|"))


def test_the_built_in_models_are_listed() -> None:
    assert sorted(n for n in models.__all__ if n.islower() and n != "randomize") == BUILT_IN


def without(folder: Path, module: str, *args: str) -> tuple[int, str, str]:
    """`run` where a module is not installed: one that fails to be imported stands before it."""
    (folder / f"{module}.py").write_text(f'raise ModuleNotFoundError("No module named {module!r}")')
    return run(folder, *args)


@pytest.mark.parametrize("module", ["torch", "numpy", "needle"])
def test_help_imports_nothing(module: str, folder: Path) -> None:
    """That is why it answers at once: numpy alone takes 0.2 s, torch seconds."""
    code, out, err = without(folder, module, "--help")
    assert (code, err) == (0, "") and "resnet18" in out


def test_without_torch(folder: Path) -> None:
    code, out, err = without(folder, "torch", "check", "mlp")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("[torch2needle] torch is missing, `pip install torch` brings it")


def test_a_needle_file_needs_no_torch(folder: Path) -> None:
    assert main(["convert", "command_nets:Net", "-o", "net.needle"]) == 0
    for args in (("fuse", "net.needle"), ("profile", "net.needle", *IMAGE, "--rounds", "1")):
        code, out, err = without(folder, "torch", *args)
        assert (code, err) == (0, "") and out, err


def test_no_message_installs_from_an_index() -> None:
    """The distribution is on none: extras come from a checkout, as in pip install ".[tvm]"."""
    root = Path(__file__).parents[1]
    files = [p for ending in ("py", "md", "toml") for p in root.glob(f"[!.b]*/**/*.{ending}")] + [root / "README.md"]
    assert [p for p in files if "torch2needle" + "[" in p.read_text()] == []


def test_interrupt(folder: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(args: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules["torch2needle.tools.command"].RUNS, "check", stop)  # type: ignore[attr-defined]
    assert main(["check", "mlp"]) == 130
    assert capsys.readouterr().err == "Stopped.\n"
