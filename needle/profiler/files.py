"""Files that are whole or not there: written under another name, then renamed."""

from __future__ import annotations

import os
from pathlib import Path


def write_file(path: str | os.PathLike[str], content: str | bytes) -> Path:
    """Write `content` to `path` (its folder is made); an interrupt leaves the old file, or none."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        part.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)
    return target
