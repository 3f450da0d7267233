"""Hook of mkdocs: a line `@@ module` becomes an entry for every public name of it, `@@ module name ...` for these names."""

from __future__ import annotations

import html
import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

MARK = re.compile(r"^@@ (\S+)(.*)$", re.M)


def on_page_markdown(markdown: str, **_: Any) -> str:
    return MARK.sub(lambda found: "\n".join(entries(found[1], found[2].split())), markdown)


def names_of(module: Any) -> list[str]:
    """A module's public names, classes of ops left out: users call their functions."""
    names = getattr(module, "__all__", None) or [n for n in vars(module) if n[0] != "_"]
    own = {n: getattr(module, n) for n in names}
    return sorted(
        n for n, v in own.items() if callable(v) and getattr(v, "__module__", "").split(".")[0] in module.__name__
    )


def entries(path: str, names: list[str]) -> Iterator[str]:
    module = importlib.import_module(path)
    for name in names or names_of(module):
        value = getattr(module, name)
        yield f"### {name}\n\n```python\n{path}.{name}{signature(value)}\n```\n"
        if doc := inspect.getdoc(value):
            yield f'<pre class="doc">{html.escape(doc)}</pre>\n'
        if inspect.isclass(value):
            yield from methods(value)


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
