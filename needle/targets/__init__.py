"""Targets of plans: one folder each. What an op becomes there, how values lie, which steps are one."""

from . import cpu, gpu

__all__ = ["cpu", "gpu"]
