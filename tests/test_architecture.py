"""The rules of the tree: imports go one way, ISA objects share no code, folders have READMEs."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
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
            rooms = (inside[:2], inside[:3])
            assert {("needle", "tvm"), ("needle", "course", "tvm"), ("torch2needle", "bridges", "relax.py")} & {
                *rooms,
                inside,
            }, path


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(p): p for root in FOREIGN for p in sorted((ROOT / root).rglob("*.py"))}


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Everything below a node, inside functions too, but what only type checkers see."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            yield from (s for other in child.orelse for s in statements(other))
            continue
        yield child
        yield from statements(child)


@functools.cache
def imported(name: str) -> frozenset[str]:
    """The modules of this tree that a module imports. A name from a package is its submodule where it has one of that name."""
    found, package = set(), name if MODULES[name].name == "__init__.py" else name.rpartition(".")[0]
    for node in statements(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            below = [f"{source}.{a.name}" for a in node.names]
            found |= {b if b in MODULES or b == "needle._core" else source for b in below}
    return frozenset(found & {*MODULES, "needle._core"}) - {name}


def circles(edges: dict[str, frozenset[str]]) -> list[set[str]]:
    """Sets of modules each of which leads to all others, by reachability."""

    def reach(start: str) -> set[str]:
        seen, left = set(), [start]
        while left:
            for n in edges.get(left.pop(), frozenset()) - seen:
                seen.add(n)
                left.append(n)
        return seen

    reached = {n: reach(n) for n in edges}
    together = {frozenset(m for m in reached[n] if n in reached.get(m, ())) for n in edges if n in reached[n]}
    return [set(c) for c in together]


def test_circles_of_imports_are_small() -> None:
    """Of needle's files at most three, imports inside functions included."""
    needle = {n: imported(n) for n in MODULES if n.partition(".")[0] == "needle"}
    assert [sorted(c) for c in circles(needle) if len(c) > 3] == []
    assert circles({"a": frozenset("b"), "b": frozenset("ac"), "c": frozenset()}) == [{"a", "b"}]


FOUNDATION = [
    f"needle.{n}"
    for n in (
        "autograd",
        "op",
        "backend_ndarray",
        "backend_selection",
        "complex_numbers",
        "exports",
        "facts",
        "files",
        "shown",
        "_core",
    )
]
ROOMS = {
    module_name(readme.parent / "__init__.py"): re.findall(r"`([\w.]+)`", found[1])
    for root in FOREIGN
    for readme in sorted((ROOT / root).rglob("README.md"))
    if (found := re.search(r"^May import: ((?:.|\n(?!\n))*?)\.$", readme.read_text(), re.M))
}


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_import_what_their_readme_says(room: str) -> None:
    """A line `May import: ...` in a folder's README holds for all below it, but for folders with a line of their own; every
    room may import the foundation.
    """
    rows = ROOMS[room] + ([] if room in FOUNDATION else FOUNDATION)
    inner = [r for r in ROOMS if r.startswith(f"{room}.")]
    for name in (n for n in MODULES if n == room or n.startswith(f"{room}.")):
        if not any(name == r or name.startswith(f"{r}.") for r in inner):
            other = {n for n in imported(name) if n != room and not n.startswith(f"{room}.")}
            allowed = {n for n in other for a in rows if n == a or n.startswith(f"{a}.")}
            assert other <= allowed, name


def test_kernel_files_use_no_standard_containers() -> None:
    for path in (ROOT / "csrc/cpu").glob("*.cpp"):
        if path.name == "backend.cpp":
            continue
        text = path.read_text()
        assert not re.search(r"#include <(vector|string|map|functional|algorithm|memory|iostream)>", text), path
        if "immintrin" in text:
            assert "simd_" in path.name, path


def test_folders_have_a_readme() -> None:
    sources = [p.parent for root in ("csrc", *FOREIGN) for p in (ROOT / root).rglob("*") if p.suffix in (".py", ".cpp")]
    rooms = {Path(*folder.relative_to(ROOT).parts[:2]) for folder in sources}
    folders = [*rooms, "needle/targets/cpu", "needle/targets/gpu", "scripts", "profiling", "tests"]
    missing = [f for f in folders if not (ROOT / f / "README.md").is_file()]
    assert not missing


def test_importing_needle_loads_no_extra() -> None:
    extras = (
        "torch",
        "matplotlib",
        "jinja2",
        "onnx",
        "tvm",
        "scipy",
        "sklearn",
        "PIL",
        "multiprocessing",
        "asyncio",
        "http",
    )
    code = f"import sys, needle, torch2needle; print(*{{*{extras}}} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout.strip() == b""


def test_importing_torch2needle_loads_no_sympy() -> None:
    """torch loads it late; it takes 35 MB and half a second."""
    code = "import sys, torch2needle; assert 'sympy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
