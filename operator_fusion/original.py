"""The names under which fusion was first published; thin over `fuse`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from needle import nn
from needle.graph import GraphModule
from needle.graph.engine import Fusion
from needle.graph.report import FusionReport

from .fuse import fuse


class OperatorFusion:
    """Fuses models and keeps the statistics of all that it fused. patterns: as in `fuse`."""

    def __init__(self, patterns: Iterable[Fusion | str] | None = None) -> None:
        self.patterns = None if patterns is None else list(patterns)
        self.reports: list[FusionReport] = []

    def fuse_model(self, model: nn.Module) -> GraphModule:
        """A fused copy of the graph over the same parameters."""
        fused = fuse(model, self.patterns)
        self.reports.append(fused.fusion_report)
        return fused

    def fuse_sequential(self, sequential: nn.Sequential | Sequence[nn.Module]) -> GraphModule:
        """`fuse_model` of a Sequential, or of layers that are to be called one after the other."""
        return self.fuse_model(sequential if isinstance(sequential, nn.Module) else nn.Sequential(*sequential))

    def print_fusion_report(self) -> None:
        print("\n\n".join(map(str, self.reports)) or "0 fusions")

    def get_fusion_stats(self) -> dict[str, Any]:
        """{total_fusions, pattern_counts, fusion_log} over every model fused so far."""
        fired = [f for r in self.reports for f in r.fired]
        counts: dict[str, int] = {}
        for f in fired:
            counts[f.pattern] = counts.get(f.pattern, 0) + 1
        log = [dataclasses.asdict(f) for f in fired]
        return {"total_fusions": len(fired), "pattern_counts": counts, "fusion_log": log}


def fuse_operators(model: nn.Module, verbose: bool = True) -> GraphModule:
    """`fuse(model)`; prints the report when verbose."""
    fusion = OperatorFusion()
    fused = fusion.fuse_model(model)
    if verbose:
        fusion.print_fusion_report()
    return fused
