"""`python -m needle.training`, and the course's `apps` folder."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import needle as ndl
from datafiles import write_cifar10, write_mnist, write_text
from needle.training import command
from needle.training.command import main

ROOT = Path(__file__).parents[1]
SMALL = ["--epochs", "2", "--batch-size", "8"]


def run(*args: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "needle.training", *args], capture_output=True, text=True)


def test_as_a_program(tmp_path: Path) -> None:
    write_text(tmp_path)
    sizes = ["--seq-len", "10", "--hidden-size", "8", "--embedding-size", "8", "--lr", "1"]
    done = run("ptb", "--data", str(tmp_path), *SMALL, *sizes)
    assert done.returncode == 0 and done.stderr == ""
    lines = done.stdout.splitlines()
    assert [line.split(":")[0] for line in lines] == ["epoch 1/2", "epoch 2/2", "test"]
    assert all("perplexity" in line for line in lines)


def test_help_and_exit_codes(tmp_path: Path, capsys: Any) -> None:
    for args in ([], ["mnist"], ["cifar10"], ["ptb"]):
        with pytest.raises(SystemExit) as e:
            main([*args, "--help"])
        assert e.value.code == 0 and "usage" in capsys.readouterr().out
    here = str(tmp_path)
    for bad in (
        [],
        ["mnist"],
        ["other", "--data", here],
        ["mnist", "--data", here, "--epochs", "0"],
        ["mnist", "--data", here, "--lr", "-1"],
        ["cifar10", "--data", here, "--workers", "-2"],
        ["ptb", "--data", here, "--resume"],
    ):
        with pytest.raises(SystemExit) as e:
            main(bad)
        assert e.value.code == 2
    capsys.readouterr()
    for task in ("mnist", "cifar10", "ptb"):
        assert main([task, "--data", here]) == 1
        out, err = capsys.readouterr()
        assert out == "" and err.startswith("[") and err.count("\n") == 1 and "there is no file" in err


def test_interruption_is_130(monkeypatch: Any, capsys: Any) -> None:
    def stop(args: Any) -> str:
        raise KeyboardInterrupt

    monkeypatch.setitem(command.RUNS, "ptb", stop)
    assert main(["ptb", "--data", "x"]) == 130
    assert capsys.readouterr().err == "Stopped.\n"
    assert main(["ptb", "--data", "x", "--checkpoint", "y"]) == 130
    assert "last whole epoch" in capsys.readouterr().err


def test_mnist_resumes_to_the_same_lines(tmp_path: Path, capsys: Any) -> None:
    write_mnist(tmp_path)
    args = ["mnist", "--data", str(tmp_path), "--hidden-dim", "16", "--batch-size", "20"]
    assert main([*args, "--epochs", "3", "--optimizer", "adamw", "--schedule", "cosine"]) == 0
    whole = capsys.readouterr().out.splitlines()
    kept = ["--checkpoint", str(tmp_path / "c"), "--optimizer", "adamw", "--schedule", "cosine"]
    args += ["--epochs", "3", *kept]
    assert main(args) == 0
    assert capsys.readouterr().out.splitlines() == whole
    assert main([*args, "--resume", "--workers", "2"]) == 0
    assert capsys.readouterr().out.splitlines() == whole[-1:]
    assert main([*args, "--resume", "--optimizer", "sgd"]) == 1
    assert capsys.readouterr().err == "[SGD] the state expects to be of this optimizer, got AdamW.\n"
    assert main([*args[:-6], "--split", "40", "--device", "cpu_numpy"]) == 0


@pytest.mark.parametrize("size", ["9999999999999", "9" * 30])
def test_sizes_beyond_memory_are_said(size: str, tmp_path: Path, capsys: Any) -> None:
    write_mnist(tmp_path)
    assert main(["mnist", "--data", str(tmp_path), "--hidden-dim", size]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("[") and err.count("\n") == 1


def test_cifar10(tmp_path: Path, capsys: Any) -> None:
    if ndl.default_device() == ndl.cpu_numpy():
        pytest.skip("convolutions in numpy are slow")
    write_cifar10(tmp_path)
    args = ["cifar10", "--data", str(tmp_path), *SMALL]
    assert main(args) == 0
    plain = capsys.readouterr().out
    assert main([*args, "--workers", "2"]) == 0
    assert capsys.readouterr().out == plain
    assert main([*args, "--augment"]) == 0
    assert capsys.readouterr().out != plain


def test_a_device_that_is_not_here_is_one_sentence(tmp_path: Path, capsys: Any) -> None:
    if ndl.cuda().enabled():
        pytest.skip("this machine has one")
    write_text(tmp_path)
    assert main(["ptb", "--data", str(tmp_path), "--device", "cuda"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("[") and err.endswith(".\n") and err.count("\n") == 1


LOOPS = ["epoch_general_cifar10", "train_cifar10", "evaluate_cifar10", "epoch_general_ptb", "train_ptb", "evaluate_ptb"]
APPS = {
    "simple_ml": ["parse_mnist", "softmax_loss", "nn_epoch", "loss_err", *LOOPS],
    "models": ["ResNet9", "LanguageModel"],
    "mlp_resnet": ["ResidualBlock", "MLPResNet", "epoch", "train_mnist"],
}


@pytest.mark.parametrize("name", APPS)
def test_apps(name: str, monkeypatch: Any) -> None:
    inside = importlib.import_module(f"needle.apps.{name}")
    monkeypatch.syspath_prepend(str(ROOT / "needle" / "apps"))
    monkeypatch.delitem(sys.modules, name, raising=False)
    alone = importlib.import_module(name)
    for member in APPS[name]:
        value = getattr(alone, member)
        assert getattr(inside, member) is value
        home = ndl.models if hasattr(ndl.models, member) else ndl.training
        assert getattr(home, member) is value
    monkeypatch.delitem(sys.modules, name)
