"""What the commands of this folder share: exit codes, JSON with the machine that it comes from."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from needle import _core
from needle.profiler.peaks import cpu_name

from .require import installed


def exit_code(run: Callable[[], int | None]) -> int:
    """What `run` gives, else 0; 1 after one sentence about what it lacks, 130 where it was stopped."""
    try:
        return run() or 0
    except KeyboardInterrupt:
        print("Stopped.", file=sys.stderr)
        return 130
    except (OSError, ValueError, RuntimeError) as e:
        print(e, file=sys.stderr)
        return 1


def machine() -> dict[str, Any]:
    return {"cpu": cpu_name(), "threads": _core.num_threads(), "tvm": installed()}


def write_json(path: Path, result: Any) -> None:
    path.write_text(json.dumps(result, indent=1) + "\n")
