"""How much of the machine other programs take while something is measured."""

from __future__ import annotations

import os
import time
from pathlib import Path

STAT = Path("/proc/stat")
TICKS = os.sysconf("SC_CLK_TCK")
MARGIN = 0.25  # cores that system services may take


def busy_seconds(text: str, cpus: set[int]) -> float:
    """Seconds that these processors have worked, from the text of /proc/stat."""
    total = 0
    for line in text.splitlines():
        name, _, rest = line.partition(" ")
        if name[:3] == "cpu" and name[3:].isdigit() and int(name[3:]) in cpus:
            user, nice, system, _idle, _wait, irq, softirq, steal = map(int, rest.split()[:8])
            total += user + nice + system + irq + softirq + steal
    return total / TICKS


class Load:
    """Others' share of the processors that this process may use, since it was made."""

    def __init__(self) -> None:
        self.cpus = os.sched_getaffinity(0)
        self.before = self.now()

    def now(self) -> tuple[float, float]:
        """Wall time, and seconds of work by others; none where the system does not tell."""
        times = os.times()
        own = times.user + times.system + times.children_user + times.children_system
        try:
            return time.perf_counter(), busy_seconds(STAT.read_text(), self.cpus) - own
        except (OSError, ValueError):
            return time.perf_counter(), 0.0

    def others(self) -> float:
        """Cores that other programs kept busy on average."""
        (start, before), (end, after) = self.before, self.now()
        return max(0.0, (after - before) / max(end - start, 1e-9))

    def warning(self, threads: int) -> str:
        """A sentence where too few cores were left for so many threads, or nothing."""
        others, cores = self.others(), len(self.cpus)
        if others <= cores - threads + MARGIN:
            return ""
        return f"Other programs took {others:.1f} of {cores} cores while this was measured, so these times say little."
