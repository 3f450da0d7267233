"""needle models in Apache TVM: export to Relax, fusion, tuning, execution (see README.md)."""

from .require import installed, require_tuning

__all__ = ["installed", "require_tuning"]
