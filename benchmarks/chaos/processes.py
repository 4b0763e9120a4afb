"""The processes of a service by kind, found by the titles that Ray gives them. Linux: it reads /proc. Knows no requests."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

TITLES = {
    "drafter actor": r"ray::DrafterActor\b",
    "drafter replica": r"ray::ServeReplica:ddtree:Drafter\b",
    "verifier rank": r"ray::VerifierRank\b",
    "verifier replica": r"ray::ServeReplica:ddtree:Verifier\b",
    "router actor": r"ray::RouterActor\b",
    "router replica": r"ray::ServeReplica:ddtree:Router\b",
}
KINDS = tuple(TITLES)


def find(root: int, titles: Mapping[str, str] = TITLES) -> dict[str, set[int]]:
    """Process ids by kind, of all kinds, among the descendants of process `root`. One that has ended is not among them."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        if (parent := _parent(folder)) is not None:
            children.setdefault(parent, []).append(int(folder.name))
    found: dict[str, set[int]] = {kind: set() for kind in titles}
    open_ends = [root]
    while open_ends:
        for pid in children.get(open_ends.pop(), ()):
            open_ends.append(pid)
            if kind := _kind(pid, titles):
                found[kind].add(pid)
    return found


def _parent(folder: Path) -> int | None:
    try:
        return int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:  # it ended meanwhile
        return None


def _kind(pid: int, titles: Mapping[str, str]) -> str | None:
    try:
        title = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")  # empty once it has ended
    except OSError:
        return None
    return next((kind for kind, pattern in titles.items() if re.match(pattern, title)), None)
