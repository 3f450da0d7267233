"""What packages have for users."""

from collections.abc import Mapping
from types import ModuleType
from typing import Any


def public(names: Mapping[str, Any]) -> list[str]:
    """For `__all__ = public(globals())`: a package's names, but for private ones, modules, and this function."""
    return [n for n, v in names.items() if n[0] != "_" and v is not public and not isinstance(v, ModuleType)]
