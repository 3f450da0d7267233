"""profiling/gpu_check.py: its parts in the emulation, so that nothing of it runs for the first time on a machine with a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import gpu_check


def test_emulation(tmp_path: Path, script_environment: dict[str, str]) -> None:
    path = tmp_path / "found.json"
    command = [sys.executable, gpu_check.__file__, "--emulation", "--json", str(path)]
    done = subprocess.run(command, env=script_environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "== a sample of the tests" in done.stdout and "[gpu_check] passed." in done.stdout
    rows = json.loads(path.read_text())["rows"]
    assert {r["precision"] for r in rows} == set(gpu_check.PRECISIONS)
    for row in rows:
        assert row["ms"]["torch eager"] > 0 and row["ms"]["torch.compile"] > 0
        reason = row["unmeasured"].get("needle", "")
        if "relu" in row["row"]:
            assert not reason or reason.startswith(("[torch_ops]", "this device has no kernel for it")), reason
        else:
            assert not reason
        assert bool(reason) != bool(row["ratios"])
        assert f"{row['row']:<40}{row['precision']:<10}" in done.stdout


@pytest.mark.parametrize("status", [0, 3])
def test_sanitizer_sample(status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a tool in its place that notes its arguments."""
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {tmp_path}/arguments\nexit {status}\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert gpu_check.sanitizer_sample("cuda") == (status == 0)
    assert (tmp_path / "arguments").read_text().split("\n")[:2] == ["--error-exitcode", "1"]


@pytest.mark.parametrize("device", ["cuda", "hip"])
def test_the_sample_has_tests(device: str, script_environment: dict[str, str]) -> None:
    command = [*gpu_check.sample(device), "--collect-only"]
    environment = script_environment | {"PYTEST_ADDOPTS": "--verbosity=-1"}
    done = subprocess.run(command, cwd=gpu_check.ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.count("::test_linear") >= 4


def test_the_library_is_built_for_the_gpu_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert gpu_check.gpu_options() == ["-DNEEDLE_CUDA=ON", "-DNEEDLE_CUDA_ARCHITECTURES=90"]
    monkeypatch.setattr(torch.version, "hip", "6.2")
    properties = type("", (), {"gcnArchName": "gfx942:sramecc+:xnack-"})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    assert gpu_check.gpu_options() == ["-DNEEDLE_HIP=ON", "-DNEEDLE_HIP_ARCHITECTURES=gfx942"]
