"""How much memory each process of a service has, over time. Linux: it reads /proc."""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median

from ..chaos.processes import TITLES, find

KINDS = TITLES | {
    "ingress": r"ray::ServeReplica:ddtree:Ingress\b",
    "proxy": r"ray::ProxyActor\b",
    "controller": r"ray::ServeController\b",
}
MIB = 1 << 20


class Memory:
    """Samples of all processes among the descendants of `root`."""

    def __init__(self, root: int) -> None:
        self._root, self._begin = root, time.monotonic()
        self.seconds: list[float] = []
        self.mib: dict[str, list[float]] = {}  # by kind and process id; NaN is never in it: all live from begin to end

    def sample(self) -> None:
        """Raises RuntimeError where a process has come or gone."""
        found = {f"{kind} {pid}": _mib(pid) for kind, pids in find(self._root, KINDS).items() for pid in pids}
        if self.mib and found.keys() != self.mib.keys():
            raise RuntimeError(f"processes have come or gone: {sorted(found.keys() ^ self.mib.keys())}")
        self.seconds.append(time.monotonic() - self._begin)
        for name, mib in found.items():
            self.mib.setdefault(name, []).append(mib)

    def growth(self) -> dict[str, float]:
        """MiB by process between the third and the last quarter of the time: medians, so that a burst does not count."""
        quarter = len(self.seconds) // 4
        return {
            name: median(values[-quarter:]) - median(values[2 * quarter : 3 * quarter])
            for name, values in self.mib.items()
            if quarter
        }


def _mib(pid: int) -> float:
    """Memory of its own; what it shares with others counts in part."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024 / MIB
    raise RuntimeError(f"process {pid} says nothing of its memory")
