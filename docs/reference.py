"""Hook of mkdocs. A line `@@ module` becomes an entry for every public name of it, `@@ module name ...` for these names,
`@@kernels` the kernel table, `@@results COLUMN` the first table of profiling/results/README.md with that column, whose pictures
pages may show by their names."""

from __future__ import annotations

import html
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MARK = re.compile(r"^@@ (\S+)(.*)$", re.M)
ITEM = re.compile(r"Raises |\w[\w, ]*: ")  # a parameter's line
WRAPPED = 100  # characters of a line of source, without its indentation, that had no room for the next word
ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "profiling" / "results"


def on_files(files: Any, config: Any) -> Any:
    """The pictures of results, where the page of benchmarks lies."""
    from mkdocs.structure.files import File

    for picture in sorted(RESULTS.rglob("*.png")):
        files.append(File.generated(config, picture.name, abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    markdown = re.sub(r"^@@kernels$", lambda _: "\n".join(kernels()), markdown, flags=re.M)
    markdown = re.sub(r"^@@results (.*)$", lambda found: "\n".join(results(found[1])), markdown, flags=re.M)
    markdown = re.sub(r"\(\.\./profiling/results/(?:\w+/)?([\w-]+\.png)\)", r"(\1)", markdown)
    return MARK.sub(lambda found: "\n".join(entries(found[1], found[2].split())), markdown)


def results(column: str) -> list[str]:
    lines = (RESULTS / "README.md").read_text().split("\n")
    start = next(i for i, line in enumerate(lines) if line.startswith("|") and f" {column} |" in line)
    return lines[start : next(i for i in range(start, len(lines)) if not lines[i].startswith("|"))]


def kernels() -> Iterator[str]:
    """A row for each: those of the CPU as they are compiled, those of GPUs alone by their row's text."""
    from needle.backend_ndarray.kernels import KERNELS

    text = (ROOT / "csrc" / "kernels" / "kernels.def").read_text()
    devices = dict(re.findall(r"^(?:KERNEL|GROUPS)\((\w+), (CPU|GPU|BOTH)", text, re.M))
    where = {"CPU": "CPU", "GPU": "GPU", "BOTH": "both"}
    yield "| kernel | dtypes | inputs | outputs | attributes | on |\n|---|---|---|---|---|---|"
    for name, row in sorted(KERNELS.items()):
        cells = (row.dtypes, row.inputs, row.outputs, row.attrs)
        on = where[devices.get(name, "BOTH")]  # maps are everywhere
        yield f"| {name} | {' | '.join(', '.join(c) for c in cells)} | {on} |"
    for name in sorted(n for n, device in devices.items() if device == "GPU"):
        yield f"| {name} | | | | | GPU |"


def names_of(module: Any) -> list[str]:
    """A module's public names, classes of ops left out: users call their functions."""
    names = getattr(module, "__all__", None) or [n for n in vars(module) if n[0] != "_"]
    own = {n: getattr(module, n) for n in names}
    return sorted(
        n
        for n, v in own.items()
        if callable(v) and (hasattr(module, "__all__") or v.__module__.startswith(module.__name__))
    )


def entries(path: str, names: list[str]) -> Iterator[str]:
    module = importlib.import_module(path)
    for name in names or names_of(module):
        value = getattr(module, name)
        yield f"### {name}\n\n```python\n{path}.{name}{signature(value)}\n```\n"
        if doc := inspect.getdoc(value):
            yield f'<div class="doc">{shown(doc)}</div>\n'
        if inspect.isclass(value):
            yield from methods(value)


def shown(doc: str) -> str:
    """A docstring as HTML: lines that end where the source's do are joined, others stay; names in backticks are code."""
    lines: list[str] = []
    last = ""  # as it stands in the source
    for line in doc.splitlines():
        if line.strip() and not ITEM.match(line) and len(last) + len(line.split()[0]) >= WRAPPED:
            lines[-1] += " " + line.strip()
        else:
            lines.append(line)
        last = line
    return re.sub(r"`([^`\n]+)`", r"<code>\1</code>", html.escape("\n".join(lines), quote=False))


def signature(value: Any) -> str:
    try:
        shown = inspect.signature(value)
    except (TypeError, ValueError):
        return "(...)"
    plain = [p.replace(annotation=p.empty) for p in shown.parameters.values() if p.name != "self"]
    text = str(shown.replace(parameters=plain, return_annotation=shown.empty))
    return text if len(text) < 90 else text.replace("(", "(\n    ", 1).replace(", ", ",\n    ")[:-1] + ",\n)"


def methods(cls: type) -> Iterator[str]:
    """The documented methods and properties that a class adds to its bases, a line each."""
    known = {name for base in cls.__mro__[1:] for name in vars(base)}
    for name, value in vars(cls).items():
        if name in known:
            continue
        value = inspect.unwrap(getattr(value, "__func__", value))
        if (
            name[0] != "_"
            and (doc := inspect.getdoc(value))
            and (inspect.isfunction(value) or isinstance(value, property))
        ):
            call = "" if isinstance(value, property) else signature(value).replace("\n    ", " ")
            yield f"- `.{name}{call}`: {doc.splitlines()[0]}"
    yield ""
