"""The pages of docs run as they stand: the Python blocks of a page, in order, in one program; and the site has every page."""

import importlib
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import needle as ndl
from needle.backend_selection import BACKEND

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
OTHERS = ("extending.md", "losses.md", "training.md")  # tests of their own run them
PAGES = [p.name for p in sorted(DOCS.glob("*.md")) if "```python" in p.read_text() and p.name not in OTHERS]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)

pytestmark = pytest.mark.skipif(BACKEND == "np", reason="the pages compile")


@pytest.mark.parametrize("name", PAGES)
def test_page_runs(name: str) -> None:
    pytest.importorskip("torch")
    text, module, threads = (DOCS / name).read_text(), {"__name__": name}, ndl.get_num_threads()
    try:
        for found in BLOCK.finditer(text):
            line = text[: found.start(1)].count("\n")
            exec(compile("\n" * line + found[1], str(DOCS / name), "exec"), module)
    finally:
        ndl.set_num_threads(threads)


@pytest.mark.parametrize("path", sorted((DOCS / "notebooks").glob("*.ipynb")), ids=lambda p: p.stem)
def test_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cells in one program, without a kernel; what they would show is not kept in the file."""
    pytest.importorskip("torch"), pytest.importorskip("onnx"), pytest.importorskip("matplotlib").use("Agg")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NEEDLE_CACHE", str(tmp_path))
    names, threads = {"__name__": path.stem}, ndl.get_num_threads()
    cells = [c for c in json.loads(path.read_text())["cells"] if c["cell_type"] == "code"]
    try:
        for cell in cells:
            exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
    finally:
        ndl.set_num_threads(threads)
    assert cells and not any(c["outputs"] or c["execution_count"] for c in cells)


def test_example_without_torch(script_environment: dict[str, str]) -> None:
    """In a process that cannot import torch."""
    script = DOCS / "examples" / "without_torch.py"
    code = f"import sys; sys.modules['torch'] = None; exec(open({str(script)!r}).read())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=script_environment)
    assert done.returncode == 0 and "right" in done.stdout, done.stderr


def test_settings_are_the_code_s() -> None:
    """docs/settings.md names every environment variable that the packages and the core read, and no other."""
    sources = [p for room in ("needle", "torch2needle", "operator_fusion", "csrc") for p in (ROOT / room).rglob("*")]
    read = re.compile(r"""(?:environ(?:\.get)?[\[(]\s*|getenv\(|FOLDER = )["'](NEEDLE_\w+)""")
    used = {
        name
        for p in sources
        if p.suffix in (".py", ".cpp", ".h", ".cu", ".cuh")
        for name in read.findall(p.read_text())
    }
    used -= {name for name in used if name.startswith("NEEDLE_EMULATION") or name == "NEEDLE_WAVE"}  # of tests
    assert used == set(re.findall(r"^\| `(NEEDLE_\w+)`", (DOCS / "settings.md").read_text(), re.M))


def test_every_page_is_in_the_site() -> None:
    named = set(re.findall(r"(\w+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M))
    assert named == {p.name for p in DOCS.glob("*.md")}


def test_links_lead_to_files_and_headings() -> None:
    """Those of every Markdown file to others; the site's builder looks at its own pages only."""
    folders = ("csrc", "docs", "needle", "operator_fusion", "profiling", "scripts", "tests", "torch2needle")
    pages = [*ROOT.glob("*.md"), *(p for f in folders for p in (ROOT / f).rglob("*.md"))]
    prose = {p: re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```$", "", p.read_text(), flags=re.M | re.S)) for p in pages}
    links = [(p, t) for p, text in prose.items() for t in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in t]
    dead = [f"{p.relative_to(ROOT)}: {t}" for p, t in links if not leads_somewhere(p, *t.partition("#")[::2])]
    assert len(links) > 40 and dead == []


def leads_somewhere(page: Path, target: str, heading: str) -> bool:
    path = page.parent / target if target else page
    if not path.exists() or not heading:
        return path.exists()
    titles = re.findall(r"^#+ (.*)$", path.read_text(), re.M)
    return heading in {re.sub(r"[^\w\- ]", "", t.lower()).replace(" ", "-") for t in titles}


def test_messages_are_the_code_s() -> None:
    """Every message of docs/messages.md is in the sources, between its numbers and names (`...`)."""
    sources = [
        p
        for room in ("needle", "torch2needle", "csrc")
        for p in (ROOT / room).rglob("*")
        if p.suffix in (".py", ".cpp")
    ]
    code = re.sub(r'"\s*\n\s*f?"', "", "\n".join(p.read_text() for p in sources))
    messages = re.findall(r"^\| `\[\w+\] ([^`]*)`", (DOCS / "messages.md").read_text(), re.M)
    parts = {part.strip(" .,;:()") for m in messages for part in m.split("...")}
    assert len(messages) > 40 and [p for p in parts if p not in code] == []


PACKAGES = ("torch2needle", "operator_fusion", "needle")
ROOMS = (*PACKAGES, *(f"needle.{room}" for room in ("ops", "nn", "optim", "init", "data", "training")))


@pytest.mark.parametrize("name", ROOMS)
def test_every_public_name_is_in_the_reference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.syspath_prepend(str(DOCS))
    import reference

    text = "".join(p.read_text() for p in DOCS.glob("api_*.md"))
    marks = [(importlib.import_module(m[1]), m[2].split()) for m in reference.MARK.finditer(text)]
    shown = {id(getattr(room, n)) for room, names in marks for n in names or reference.names_of(room)}
    module = importlib.import_module(name)
    public = {n: getattr(module, n) for n in getattr(module, "__all__", vars(module)) if n[0] != "_"}
    own = {n: v for n, v in public.items() if getattr(v, "__module__", "").split(".")[0] in PACKAGES and callable(v)}
    assert len(own) > 9 and [n for n, v in own.items() if id(v) not in shown] == []

    bare = [n for n, v in own.items() if not (v.__doc__ if inspect.isclass(v) else says(v))]
    assert bare == [], "without a docstring of their own"


TOLD = re.compile(  # words by which a docstring tells shapes, or whose shapes an operation has
    r"shape|\b(?:axis|axes|rows?|columns?|vectors?|matri\w+|square|images?|sequences?|labels?|logits?|classes|pairs)\b|broadcast"
    r"|\([A-Z*.B1-9][\w *]*,|\(\*|\(\.\.\.|\b[Ee]lements?\b|numpy\.|torch\.|Same|like |`\w+`"
)
SCALARS = {"shift": (True,), "threshold": (0.3, 1.0)}  # arguments behind the tensors
WHOLE = {"bitwise_not", "shift"}


def test_functions_tell_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or they keep what the page of functions says of the others: any shape, element by element, broadcast as numpy's."""
    monkeypatch.syspath_prepend(str(DOCS))
    import reference

    for name in reference.names_of(ndl.ops):
        function, more = getattr(ndl.ops, name), SCALARS.get(name, ())
        if TOLD.search(inspect.getdoc(function) or ""):
            continue
        parameters = inspect.signature(function).parameters
        needed = [p for p in parameters.values() if p.default is p.empty]
        whole = {"reduction": "none"} if "reduction" in parameters else {}
        dtype = "int32" if name in WHOLE else "float32"
        given = [ndl.Tensor(np.ones(shape, dtype), dtype=dtype) for shape in ((2, 3), (3,))][: len(needed) - len(more)]
        assert tuple(function(*given, *more, **whole).shape) == (2, 3), name


def says(function: Any) -> str:
    """Its docstring, of a function of the core without the signature that stands before it."""
    return re.sub(r"^\w+\(.*\) -> .*\n?", "", inspect.getdoc(function) or "").strip()
