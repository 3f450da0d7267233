"""Command lines of torch2needle: exit code 0, 1 or 2, one sentence for what is wrong, no traceback, and no file that runs."""

from __future__ import annotations

import atexit
import contextlib
import functools
import io
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from archives import ATTACKS, CANARY, evil_pickle, rewrite, save_good
from named_nets import NETS
from torch2needle.tools.command import main

from .frame import Wrong

NAME, SAMPLE, FULL, SECONDS = "cli", 200, 2_000, 120
OWN_NETS = """
class Line(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 4)
    def forward(self, x, scale=2.0):
        return self.linear(x) * scale

class Two(nn.Module):
    def forward(self, x, ids, mask):
        return {"a": torch.where(mask, x, x + ids), "none": None}

class Bad(nn.Module):
    def forward(self, x):
        return torch.special.i0(x)

class Branch(nn.Module):
    def forward(self, x):
        return x + 1 if x.sum() > 0 else x

class Raises(nn.Module):
    def forward(self, x):
        raise RuntimeError("no\\nway")

class NoForward(nn.Module):
    pass

def fails(): raise RuntimeError("no such\\ncheckpoint")
number, ready = 3, Line()
"""
MODELS = (
    *(f"cli_nets:{n}" for n in ["Net", "Line", "Two", "NoWeights", "Bad", "Branch", "Raises", "NoForward"]),
    *("cli_nets:fails", "cli_nets:quits", "cli_nets:deep", "cli_nets:number", "cli_nets:ready", "cli_nets:absent"),
    *("cli_nets:Net", "cli_nets:Line", "cli_nets:Line", "good.pt2", "good.pt2", "net.needle", "net.needle", "mlp"),
    *(
        "cli_broken:f",
        "no_such:f",
        ":",
        "a:",
        ":b",
        "..:x",
        "os:getcwd",
        "torch.nn:ReLU",
        "resnet19",
        "",
        "torch.nn:Module",
    ),
)
FILES = (
    "good.pt2",
    "net.needle",
    "w.pt",
    "w.safetensors",
    "evil.pt",
    "empty.pt2",
    "empty",
    "folder",
    "absent",
    "absent.pt2",
)
SHAPES = (
    *("1x3x6x6", "2x3x8x7", "1x3", "2x3", "5x3", "0x3", "scalar", "3", "1x4x6x6", "x=2x3", "x=1x3x6x6", "1x784", "2x0"),
    *("ids=3:int64", "mask=2x3:bool", "3:int64", "2x3:bool", "2x3:float64", "2x3:int32", "y=1", "x=2x3:float64"),
    *(
        "99999999999999x3",
        "9" * 40,
        "1x1x1x1x1x1x1x1x1x1x1x1x1x1x1x1x1x1",
        "-1x3",
        "1.5",
        "x=",
        "=3",
        "2x3:half",
        "",
        "1x3x0x6",
    ),
)
JSON = (
    "[]",
    "{}",
    "[6]",
    '{"width": 6}',
    '{"bias": false}',
    "[1, 2, 3]",
    "{",
    "[" * 5000,
    "null",
    '"a"',
    "[-1]",
    '{"q": 1}',
)


def draw(rng: random.Random) -> Any:
    """(in a process of its own, words): a word FILE!SEED is the file with some bytes damaged, attack!NAME a crafted archive."""
    task = rng.choice(("convert", "check", "verify", "profile", "fuse"))
    words = [task if rng.random() < 0.97 else rng.choice(("", "Convert", "--help", "-x")), model(rng)]
    options: dict[str, Any] = {
        "--input": lambda: shape(rng),
        "--args": lambda: rng.choice(JSON),
        "--kwargs": lambda: rng.choice(JSON),
        "--weights": lambda: file(rng),
        "--seed": lambda: rng.choice(("0", "7", "-1", "x", "9" * 30)),
        "--output": lambda: rng.choice(("out.needle", "folder", "absent/out", "/proc/out", "", "good.pt2/x")),
        "--net": lambda: file(rng),
        "--rounds": lambda: rng.choice(("1", "2", "0", "x")),
        "--disable": lambda: rng.choice(("ConvBatchNorm2dReLU", "LinearReLU", "None", "")),
        "--html": lambda: rng.choice(("p.html", "absent/p.html", "folder")),
        "--trace": lambda: rng.choice(("t.json", "absent/t.json", "folder")),
    }
    flags = ("--fuse", "--json", "--eager", "--dry-run", "--unknown")
    usual = {"convert": ["--output"], "verify": ["--input"], "profile": ["--input"]}.get(task, [])
    for name in [*usual, *rng.choices([*options, "--input", "--input", "--weights"], k=rng.randrange(4))]:
        words += [name, options[name]()]
    words += [f for f in flags if rng.random() < 0.1]
    if rng.random() < 0.03:
        words.pop(rng.randrange(len(words)))
    return rng.random() < 0.04, words


def model(rng: random.Random) -> str:
    if rng.random() < 0.2:
        return f"attack!{rng.choice(sorted(ATTACKS))}"
    return file(rng) if rng.random() < 0.15 else rng.choice(MODELS)


def file(rng: random.Random) -> str:
    name = rng.choice(FILES)
    return f"{name}!{rng.randrange(10**6)}" if rng.random() < 0.4 else name


def shape(rng: random.Random) -> str:
    return rng.choice(SHAPES[:6] if rng.random() < 0.5 else SHAPES)


# -- running -------------------------------------------------------------------------------------------------------------


@functools.cache
def folder() -> Path:
    """What command lines name, in a folder that goes with the process."""
    path = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    (path / "cli_nets.py").write_text(NETS + OWN_NETS)
    (path / "cli_broken.py").write_text("def f(:")
    (path / "folder").mkdir()
    (path / "empty").touch(), (path / "empty.pt2").touch()
    (path / "evil.pt").write_bytes(evil_pickle())
    state = torch.nn.Linear(3, 4).state_dict()
    state = {f"linear.{k}": v for k, v in state.items()}
    torch.save(state, path / "w.pt")
    save_file(state, path / "w.safetensors")
    save_good(path / "good.pt2")
    sys.path.insert(0, str(path))
    with inside(path), contextlib.redirect_stdout(io.StringIO()):
        main(["convert", "cli_nets:Line", "-o", "net.needle"])
    return path


@contextlib.contextmanager
def inside(path: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(path)
    try:
        yield
    finally:
        os.chdir(before)


def made(word: str) -> str:
    """The word of the command line for a case's; writes the file that it names."""
    name, mark, how = word.partition("!")
    if not mark:
        return word
    if name == "attack":
        edits, more, _ = ATTACKS[how]
        rewrite("good.pt2", "attack.pt2", edits, more)
        return "attack.pt2"
    path, out = Path(name), f"damaged{Path(name).suffix}"
    if not path.is_file():
        return name
    content, rng = bytearray(path.read_bytes()), random.Random(how)
    for _ in range(rng.randrange(4)):
        if content:
            content[rng.randrange(len(content))] = rng.randrange(256)
    Path(out).write_bytes(content[: rng.randrange(len(content) + 1)] if rng.random() < 0.3 else content)
    return out


def run(words: list[str]) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(words)
        except SystemExit as e:  # argparse
            code = e.code if isinstance(e.code, int) else -1
    return code, out.getvalue(), err.getvalue()


def run_process(words: list[str]) -> tuple[int, str, str]:
    done = subprocess.run([sys.executable, "-m", "torch2needle", *words], capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def check(case: Any) -> str:
    own_process, given = case
    with inside(folder()):
        words = [made(w) for w in given]
        code, out, err = (run_process if own_process else run)(words)
        ran = Path(CANARY).exists()
        if ran:
            os.rmdir(CANARY)
    lines = [line for line in err.splitlines() if not line.startswith("warning: [")]
    if ran:
        raise Wrong("a file ran")
    if code not in (0, 1, 2):
        raise Wrong(f"exit code {code}: {err[-300:]}")
    if "Traceback" in out + err:
        raise Wrong(f"a traceback: {err[-300:]}")
    if code == 0 and lines:
        raise Wrong(f"said although all is well: {lines[0][:300]}")
    if code == 1 and not (out if not lines else lines[0].startswith("[")):
        raise Wrong(f"exit code 1 without a reason: {err[-300:]}")
    if code == 2 and not usage(err):
        one = len(lines) == 1 and lines[0].startswith("[") and lines[0].endswith(".")
        if not one:
            raise Wrong(f"no sentence: {err[-300:]}")
    how = f": {lines[-1].split(']')[0][:20]}]" if code and lines and lines[-1].startswith("[") else ""
    return f"exit code {code}{how}"


def usage(err: str) -> bool:
    return err.startswith("usage: torch2needle") and ": error: " in err.splitlines()[-1]


def smaller(case: Any) -> Iterable[Any]:
    own_process, words = case
    if own_process:
        yield False, words
    for i in range(2, len(words)):
        yield own_process, [*words[:i], *words[i + 1 :]]
        yield own_process, [*words[:i], *words[i + 2 :]]
