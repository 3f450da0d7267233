"""What the package says of itself and its machine. Imports nothing of needle, so that command lines answer at once."""

from __future__ import annotations

import os
import platform
from pathlib import Path

VERSION = "0.1.0"
FOLDER = "NEEDLE_GPU_LIBRARIES"  # environment variable: where libraries lie that are not beside needle._core


def cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def cache_folder() -> Path:
    """$NEEDLE_CACHE, else torch2needle in $XDG_CACHE_HOME or ~/.cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("NEEDLE_CACHE") or os.path.join(cache, "torch2needle")).expanduser()


def library_folders(core: str) -> list[Path]:
    """Where GPU libraries are looked for; core: the file of needle._core."""
    extra = os.environ.get(FOLDER)
    return [Path(core).parent, *([Path(extra)] if extra else [])]
