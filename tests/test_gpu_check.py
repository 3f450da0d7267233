"""scripts/gpu_check: every phase rehearsed in the emulation, so that nothing of it runs for the first time on the machine: in a
copy without .git, in a bare virtual environment, without a network."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import gpu_check
import gpu_models
import gpu_rows
from gpu_devices import gpu_library
from needle import _core

ROOT = Path(__file__).resolve().parent.parent
SOURCES = (
    "csrc",
    "needle",
    "torch2needle",
    "operator_fusion",
    "profiling",
    "scripts",
    "tests",
    "CMakeLists.txt",
    "pyproject.toml",
)
NO_NETWORK = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9") | {
    "PIP_NO_INDEX": "1"
}


def cut_off() -> list[str]:
    """A prefix of commands that takes their network away, where this is allowed."""
    for options in (["-n"], ["-rn"]):
        if (
            shutil.which("unshare")
            and subprocess.run(["unshare", *options, "true"], capture_output=True).returncode == 0
        ):
            return ["unshare", *options]
    return []


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs `scripts/gpu_check` there: (*arguments) -> the process that ended."""
    home = tmp_path_factory.mktemp("machine")
    unwanted = shutil.ignore_patterns("*.so", "__pycache__", "results")
    for name in SOURCES:
        source = ROOT / name
        shutil.copytree(source, home / name, ignore=unwanted) if source.is_dir() else shutil.copy(source, home)
    built = home.parent / "built"
    built.mkdir(exist_ok=True)
    core = Path(_core.__file__)
    for library in (core, core.parent / "lib" / "libneedle.so", *(gpu_library(f"emulation_w{w}") for w in (32, 64))):
        shutil.copy(library, built)
    (built / gpu_check.PROBE).write_text("#!/bin/sh\ntest -f $1\n")
    (built / gpu_check.PROBE).chmod(0o755)
    venv.create(home / "bare", symlinks=True)
    (packages,) = (home / "bare").glob("lib/*/site-packages")
    (packages / "system.pth").write_text("\n".join(p for p in sys.path if p.endswith("site-packages")))
    tools = home / "tools"
    tools.mkdir()
    (tools / "compute-sanitizer").write_text('#!/bin/sh\nprintf "%s\\n" "$@" > arguments\nshift 6\nexec "$@"\n')
    (tools / "compute-sanitizer").chmod(0o755)
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("NEEDLE_", "PYTHON", "PYTEST"))}
    environment |= NO_NETWORK | {
        "NEEDLE_PYTHON": str(home / "bare" / "bin" / "python"),
        "PATH": os.pathsep.join([str(tools), str(Path(sys.executable).parent), os.environ["PATH"]]),
    }

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [*cut_off(), "bash", "scripts/gpu_check", *arguments, "--device", "emulation", "--out", "out"]
        return subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True)

    run.home = home  # type: ignore[attr-defined]
    return run


@pytest.mark.timeout(900)  # a minute where nothing else runs
def test_rehearsal(machine: Any) -> None:
    early = machine("test")
    assert (
        early.returncode == 1
        and early.stdout == "[gpu_check] nothing is built yet: `scripts/gpu_check build` comes first.\n"
    )
    done = machine("--rehearse", "--built", "../built")
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    ended = done.stdout.split("rehearsed in the emulation:\n")[1]
    times, lacking = ended.split("Left out on hardware:\n")
    assert [line.partition(":")[0] for line in times.splitlines()] == list(gpu_check.PHASES)
    assert lacking.strip() and "compute-sanitizer" not in lacking
    found = {p: json.loads((machine.home / "out" / f"{p}.json").read_text()) for p in gpu_check.PHASES if p != "report"}
    assert found["build"]["opens"]["needle"] == str(machine.home / "build/gpu-check/site/needle/__init__.py")
    assert set(found["sanitize"]) == {"memcheck"}
    assert (machine.home / "arguments").read_text().split("\n")[:4] == ["--tool", "memcheck", "--error-exitcode", "1"]
    assert set(found["test"]) == {"tests/test_gpu_memory.py"} and "why" not in found["test"]["tests/test_gpu_memory.py"]
    (chosen,) = found["choose"]["rows"]
    assert [lib["name"] for lib in chosen["libraries"]] == ["test_products", "test_convolutions"]
    rows = {r["row"]: r for r in found["bench"]["rows"]}
    assert set(rows) == {"linear-relu 5 x 8-4", "encoder S=6, batch 2"}
    assert rows["encoder S=6, batch 2"]["ratios"].keys() == {"torch eager", "torch.compile"}
    assert rows["linear-relu 5 x 8-4"]["unmeasured"]["needle"].startswith(("[torch_ops]", "this device has no kernel"))
    again = machine("bench", *gpu_check.ROWS)
    assert again.returncode == 0 and "encoder" not in again.stdout  # measured before
    text = (machine.home / "out" / "report.txt").read_text()
    assert "encoder S=6, batch 2, tf32: needle " in text and "unmeasured" in text and "memcheck: good" in text


# -- going on where a call ended -------------------------------------------------------------------------------------------


def checked(tmp_path: Path, phase: str, *arguments: str) -> gpu_check.Check:
    places = ("--out", str(tmp_path / "out"), "--work", str(tmp_path))
    return gpu_check.Check(gpu_check.arguments([phase, *arguments, *places]))


def test_parts_that_are_good_are_done(tmp_path: Path) -> None:
    check = checked(tmp_path, "test")
    check.put("a", {"good": True})
    check.put("b", {"good": False})
    check = checked(tmp_path, "test")
    assert list(gpu_check.parts(check, ["a", "b", "c"])) == ["b", "c"]
    assert list(gpu_check.parts(checked(tmp_path, "test", "c"), ["a", "b", "c"])) == ["c"]
    assert list(gpu_check.parts(checked(tmp_path, "test", "--again"), ["a", "b", "c"])) == ["a", "b", "c"]
    assert list(gpu_check.parts(checked(tmp_path, "test", "--minutes", "0"), ["c"])) == []


def test_what_takes_too_long_is_ended(tmp_path: Path) -> None:
    check = checked(tmp_path, "test", "--minutes", "0.03")
    ended = check.run("sleeps", "sh", "-c", "echo begun; sleep 60")
    assert (ended["good"], ended["why"], ended["tail"]) == (False, "the time was up", "begun\n")


def test_a_row_that_ends_the_process_is_not_tried_again(tmp_path: Path) -> None:
    target = gpu_rows.Target("cpu", None, "nothing")  # type: ignore[arg-type]
    row = gpu_models.small_rows()[0]
    gpu_rows.Results(tmp_path / "r.json", target).put(gpu_rows.unmeasured(row, ["needle"], gpu_rows.ENDED))
    found = gpu_rows.Results(tmp_path / "r.json", target).rows
    assert found[row.title, row.precision]["unmeasured"] == {"needle": "the process ended here."}


def test_rows_by_words() -> None:
    titles = {f"{r.title}, {r.precision}" for r in gpu_models.rows_of("cuda", ["ResNet-50", "tf32"])}
    assert "ResNet-50 @224, batch 1, float32" in titles and "BERT-base S=128, batch 32, tf32" in titles
    assert all("ResNet-50" in t or "tf32" in t for t in titles)
    assert len(gpu_models.rows_of("cuda", [])) == 54
    assert len(gpu_models.rows_of("cuda", ["timm"])) == 60 and gpu_models.rows_of("emulation", ["timm"]) == []


@pytest.mark.parametrize("device", ["cuda", "hip"])
def test_the_sample_has_tests(device: str, script_environment: dict[str, str]) -> None:
    command = [*map(str, gpu_check.sample(device)), "--collect-only"]
    environment = script_environment | {"PYTEST_ADDOPTS": "--verbosity=-1", "NEEDLE_TEST_DEVICES": device}
    done = subprocess.run(command, cwd=gpu_check.ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.count("::test_linear") >= 4


# -- what is built ---------------------------------------------------------------------------------------------------------


def test_the_library_is_built_for_the_gpu_at_hand(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "nvidia").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path), "/nowhere"])
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    expected = ["-DNEEDLE_CUDA=ON", "-DNEEDLE_CUDA_ARCHITECTURES=90", f"-DNEEDLE_WHEELS={tmp_path}"]
    assert gpu_check.gpu_options("cuda") == expected
    monkeypatch.setattr(torch.version, "hip", "6.2")
    properties = type("", (), {"gcnArchName": "gfx942:sramecc+:xnack-"})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    assert gpu_check.gpu_options("cuda") == ["-DNEEDLE_HIP=ON", "-DNEEDLE_HIP_ARCHITECTURES=gfx942"]


def test_another_torch_has_no_torch_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu_check.for_this_torch() == ""
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    assert gpu_check.for_this_torch() == "torch.ops.needle is built for torch 2.13, this is 2.11.0+cu130"


@pytest.mark.skipif(not shutil.which("nvcc") or not shutil.which("cmake"), reason="nvcc or cmake is missing")
def test_headers_in_wheels_are_found(tmp_path: Path) -> None:
    """Where the toolkit has none: PyPI's cuDNN lies in nvidia/cudnn, its cuBLAS in nvidia/cu13 or nvidia/cublas."""
    for folder, header in (("cudnn", "cudnn_graph.h"), ("cu13", "cublasLt.h")):
        (tmp_path / "nvidia" / folder / "include").mkdir(parents=True)
        (tmp_path / "nvidia" / folder / "include" / header).touch()
    script = tmp_path / "find.cmake"
    text = (ROOT / "csrc/gpu/CMakeLists.txt").read_text()
    start, end = text.index("  foreach(folder ${NEEDLE_WHEELS})"), text.index("  foreach(library CUBLASLT CUDNN)")
    script.write_text(text[start:end] + 'message("${NEEDLE_CUBLASLT_INCLUDE} ${NEEDLE_CUDNN_INCLUDE}")\n')
    done = subprocess.run(["cmake", f"-DNEEDLE_WHEELS={tmp_path}", "-P", script], capture_output=True, text=True)
    assert done.stderr.split() == [str(tmp_path / "nvidia/cu13/include"), str(tmp_path / "nvidia/cudnn/include")]
