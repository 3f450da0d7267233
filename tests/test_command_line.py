"""The command line: every subcommand as a user runs it, exit codes, and one sentence for what is wrong."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
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


def test_every_subcommand(folder: Path, capsys: Any) -> None:
    """In turn; with and without torch as processes of their own, since each import of torch takes seconds."""

    def here(*args: str) -> tuple[int, str, str]:
        capsys.readouterr()
        return main(list(args)), *capsys.readouterr()

    made = "convert", "command_nets:Net", "--kwargs", '{"width": 6}', "--fuse", "-o", "net.needle"
    code, out, err = run(folder, *made)
    assert (code, err) == (0, "") and out.startswith("net.needle: 1 calls, 180 parameters, ")
    shape = ("--input", "2x3x8x9")
    kwargs = ("--args", "[6]")
    code, out, err = here("verify", "command_nets:Net", *kwargs, *shape, "--net", "net.needle")
    assert (code, err) == (0, "") and "needle agrees with torch" in out and "compiled  output  (2, 6, 6, 7)" in out
    code, out, err = here("check", "command_nets:Bad", "--json")
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
    code, out, err = here("fuse", "command_nets:Net", "--dry-run")
    assert (code, err) == (0, "") and out.startswith("1 fusions would apply, 3 -> 1 calls")


def test_help(capsys: Any) -> None:
    parts = ("convert", "export", "check", "verify", "profile", "fuse", "run", "bench", "info")
    for args in ([], *([part] for part in parts)):
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
    "check a file": (
        ("check", "net.needle"),
        2,
        "[model] check expects a torch model, got the file net.needle: a saved",
    ),
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
    "no array": (("run", "net.needle", "-i", "none.npy"), 2, "[input] there is no file none.npy."),
    "no numbers": (("run", "net.needle", "-i", "net.needle"), 2, "[input] net.needle is not a .npy file of numbers."),
    "arrays": (("run", "net.needle"), 2, "[run] the model does not run on these inputs: [GraphModule] input x is miss"),
    "bench a file": (
        ("bench", "net.needle", *IMAGE),
        2,
        "[model] bench expects a torch model, got the file net.needle: a saved needle net, which run, export, ",
    ),
    "page": (("fuse", "command_nets:Net", "--html", "folder"), 2, "[fuse] cannot write folder: Is a directory."),
    "output": (
        ("convert", "command_nets:Net", "-o", "no/such/folder"),
        2,
        "[save] cannot write no/such/folder: No such file or directory.",
    ),
    "output is a folder": (
        ("convert", "command_nets:Net", "-o", "folder"),
        2,
        "[save] cannot write folder: Is a directory.",
    ),
    "shape": (
        ("verify", "command_nets:Net", "--input", "1x4x6x6"),
        2,
        "[input] the model does not run on these inputs: RuntimeError: Given groups=1",
    ),
    "one too many, checked": (("check", "command_nets:Net", *IMAGE, *IMAGE), 2, "[input] the model does not run"),
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
    "run a model": (("run", "mlp"), 2, "[load] expects a saved needle net, which convert makes of models, got mlp."),
    "a folder": (("check", "folder"), 2, "[model] expects package.module:callable, a file that exists, or one of"),
    "half a name": (("check", "command_nets:"), 2, "[model] expects package.module:callable, a file that exists,"),
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
    "peer": (["bench", "mlp", "--input", "1", "--peer", "ncnn"], "invalid choice: 'ncnn'"),
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


# -- run, bench, info ----------------------------------------------------------------------------------------------------

SPLITS = """

class Splits(nn.Module):
    def forward(self, x, y):
        return {"sum": x + y, "parts": (x - y, x > y)}
"""


def test_run_gives_the_model_s_results(folder: Path, capsys: Any) -> None:
    """In the model's order, by position and by name, also without torch, and under the names that were given."""
    (folder / "command_nets.py").write_text(NETS + OWN_NETS + SPLITS)
    assert main(["convert", "command_nets:Splits", "--input", "2x3", "--input", "2x3", "-o", "two.needle"]) == 0
    rng = np.random.default_rng(0)
    x, y = (rng.standard_normal((2, 3)).astype("float32") for _ in range(2))
    np.save("x.npy", x), np.save("y.npy", y)
    outputs = ["-o", "sum", "-o", "difference.npy", "-o", "larger.out"]
    for given in (["-i", "x.npy", "-i", "y.npy"], ["-i", "y=y.npy", "-i", "x=x.npy"]):
        code, out, err = without(folder, "torch", "run", "two.needle", *given, *outputs)
        assert (code, err) == (0, ""), err
        assert out.count("result ") == 3 and "result 0: (2, 3) float32, least " in out and "wrote sum\n" in out
        for name, want in (("sum", x + y), ("difference.npy", x - y), ("larger.out", x > y)):
            got = np.load(name)
            assert got.dtype == want.dtype and (got == want).all()
            os.remove(name)
    capsys.readouterr()
    assert main(["run", "two.needle", "-i", "x.npy", "-i", "y.npy", "-o", "one"]) == 2
    assert capsys.readouterr().err == "[run] the model gives 3 results, got 1 times --output.\n"
    assert main(["run", "two.needle", "-i", "x=x.npy", "-i", "x=y.npy"]) == 2
    assert capsys.readouterr().err == "[input] expects one array for x, got two.\n"


def test_bench_times_what_is_right_alone(folder: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = importlib.import_module("torch2needle.tools.bench")
    monkeypatch.setattr(bench, "BURST", 0.01), monkeypatch.setattr(bench, "PAUSE", 0.0)

    def fails(model: Any, net: Any, inputs: Any) -> Any:
        raise RuntimeError("no compiler")

    monkeypatch.setitem(bench.ENGINES, "torch.compile", fails)
    args = ["bench", "command_nets:Net", *IMAGE, "--rounds", "3", "--json", "b.json"]
    assert main(args) == 0
    out, document = capsys.readouterr().out, json.loads(Path("b.json").read_text())
    rows = {r["engine"]: r for r in document["rows"]}
    timed = [*(["onnxruntime"] if importlib.util.find_spec("onnxruntime") else []), "needle compiled", "torch eager"]
    assert {n for n, r in rows.items() if r["times"]} >= set(timed) and next(iter(rows)) == "needle compiled"
    assert all(len(rows[n]["times"]) == 3 and rows[n]["difference"] < 1e-4 for n in timed)
    assert "torch.compile     does not run: RuntimeError: no compiler" in out and "3 alternating rounds" in out
    assert all(w in out for w in document["warnings"])

    monkeypatch.setitem(bench.ENGINES, "torch eager", lambda model, net, inputs: lambda: model(*inputs) * 1.01)
    assert main([*args[:-2], "--peer", "torch eager"]) == 0
    assert "torch eager       its result differs from torch's, so it is not timed" in capsys.readouterr().out


DIFFERENCES = {
    "equal": ([1.0, -2.0], [1.0, -2.0], 0.0),
    "half": ([1.0, -2.0], [1.0, -4.0], 0.5),
    "same nan and infinity": ([np.nan, np.inf, 1.0], [np.nan, np.inf, 1.0], 0.0),
    "one nan": ([np.nan, 1.0], [2.0, 1.0], np.inf),
    "other infinity": ([np.inf, 1.0], [-np.inf, 1.0], np.inf),
    "empty": ([], [], 0.0),
    "shapes": ([1.0], [1.0, 2.0], np.inf),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_differences(name: str) -> None:
    got, want, expected = DIFFERENCES[name]
    bench = importlib.import_module("torch2needle.tools.bench")
    assert bench.difference([np.asarray(got)], [np.asarray(want)]) == pytest.approx(expected)
    assert bench.difference([np.asarray(got)], []) == np.inf


def test_a_busy_machine_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    load = importlib.import_module("needle.profiler.load")
    text = (
        "cpu  9 9 9 9\ncpu0 100 50 50 900 7 0 0 0 0 0\ncpu1 300 0 0 900 7 10 20 70 0 0\ncpu10 900 0 0 0 0 0 0 0 0 0\n"
    )
    assert load.busy_seconds(text, {0, 1}) == 600 / load.TICKS
    measured = load.Load()
    monkeypatch.setattr(measured, "cpus", {0, 1, 2, 3})
    for others, threads, told in ((1.0, 4, True), (1.0, 3, False), (0.1, 4, False), (3.9, 1, True)):
        monkeypatch.setattr(measured, "others", lambda others=others: others)
        assert bool(measured.warning(threads)) is told


@pytest.mark.parametrize("args", [["--version"], ["info"]], ids=" ".join)
def test_what_is_here_is_told_without_imports(args: list[str], folder: Path) -> None:
    """Which is why it takes a tenth of a second; needle can still be imported afterwards."""
    code = f"""
import sys
from torch2needle.tools.command import main
try:
    main({args})
except SystemExit as e:
    assert e.code == 0
print({{"torch", "numpy", "needle"}} & set(sys.modules))
import needle
print(needle.__version__, needle.isa(), needle.Tensor([1.0]).numpy())
"""
    root = Path(sys.modules["torch2needle"].__file__ or "").parents[1]
    env = os.environ | {"PYTHONPATH": str(root), "NEEDLE_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, env=env, capture_output=True, text=True, check=True)
    *told, loaded, here = done.stdout.splitlines()
    assert loaded == "set()" and here == f"{ndl.__version__} {ndl.isa()} [1.]"
    if args == ["info"]:
        rows = dict(re.split(r"  +", line, maxsplit=1) for line in told)
        assert rows["torch2needle"] == ndl.__version__ and rows["kernels"] == ndl.isa() and rows["threads"] == "1"
        assert rows["torch"] == importlib.metadata.version("torch") and "NEEDLE_NUM_THREADS=1" in rows["settings"]
    else:
        assert told == [f"torch2needle {ndl.__version__}"]


def test_pages_have_the_model_s_name(folder: Path, capsys: Any) -> None:
    assert main(["convert", "command_nets:Net", "-o", "net.needle"]) == 0
    for model in ("command_nets:Net", "net.needle"):
        title = "Net" if ":" in model else model
        assert main(["profile", model, *IMAGE, "--rounds", "1", "--html", "p.html"]) == 0
        assert main(["fuse", model, "--dry-run", "--html", "f.html"]) == 0
        assert f"<h1>{title}, compiled</h1>" in Path("p.html").read_text()
        assert f"<h1>{title}: 3 calls would become 1</h1>" in Path("f.html").read_text()


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("torch2needle ", {"convert", "run", "bench", "info"}),
        ("torch2needle che", {"check"}),
        ("torch2needle check res", {"resnet18", "resnet_pictures.pt2"}),
        ("torch2needle bench resnet18 --p", {"--peer"}),
        ("torch2needle bench resnet18 --peer o", {"onnxruntime"}),
    ],
)
def test_a_shell_completes(line: str, offered: set[str], folder: Path) -> None:
    pytest.importorskip("argcomplete")
    (folder / "resnet_pictures.pt2").touch()
    asks = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_STDOUT_FILENAME": str(folder / "offered"), "_ARGCOMPLETE_IFS": "\n"}
    env = os.environ | asks | {"COMP_LINE": line, "COMP_POINT": str(len(line)), "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-m", "torch2needle"], cwd=folder, env=env, check=True, timeout=60)
    assert offered <= {text.strip() for text in (folder / "offered").read_text().split("\n")}
