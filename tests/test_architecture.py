"""The rules of the tree: imports go one way, ISA objects share no code, folders have READMEs."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOREIGN = {
    "needle": {"torch2needle", "operator_fusion", "torch", "torchvision"},
    "operator_fusion": {"torch2needle", "torch", "torchvision"},
    "torch2needle": set(),
}


def imported_roots(path: Path) -> set[str]:
    roots = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            roots |= {a.name.partition(".")[0] for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            roots.add(node.module.partition(".")[0])
    return roots


@pytest.mark.parametrize("package", FOREIGN)
def test_imports_go_one_way(package: str) -> None:
    for path in (ROOT / package).rglob("*.py"):
        assert not imported_roots(path) & FOREIGN[package], path
        if "tvm" in imported_roots(path):
            inside = path.relative_to(ROOT).parts
            assert inside[:2] == ("needle", "tvm") or inside == ("torch2needle", "relax.py"), path


def test_kernel_files_use_no_standard_containers() -> None:
    for path in (ROOT / "csrc/cpu").glob("*.cpp"):
        if path.name == "backend.cpp":
            continue
        text = path.read_text()
        assert not re.search(r"#include <(vector|string|map|functional|algorithm|memory|iostream)>", text), path
        if "immintrin" in text:
            assert "simd_" in path.name, path


def test_folders_have_a_readme() -> None:
    folders = [
        "csrc",
        "csrc/core",
        "csrc/cpu",
        "csrc/gpu",
        "csrc/math",
        "csrc/python",
        "csrc/torch",
        "needle",
        "needle/ops",
        "needle/nn",
    ]
    folders += [
        "needle/graph",
        "needle/executor",
        "needle/tvm",
        "torch2needle",
        "operator_fusion",
        "scripts",
        "profiling",
        "tests",
    ]
    missing = [f for f in folders if not (ROOT / f / "README.md").is_file()]
    assert not missing
