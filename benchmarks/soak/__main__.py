"""Serves a configuration and asks it everything at random for a long time, clients that go away included. Then: has any process
grown, is every page free again, has anything failed?

    python -m benchmarks.soak CONFIG --minutes 30 --out DIR [--clients 6]

Run it in the repository, on Linux. Writes soak-NAME.json and .png and the service's output; the exit status is 1 where a process
has grown by more than 2 % and 8 MiB between the third and the last quarter, a page is not free, or an answer was not right.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import matplotlib

from ddtree.deployments.commands.prompts import read_prompts

from ..plot import bare
from ..run import head
from ..serving.service import serving
from .memory import Memory
from .mix import Clients

matplotlib.use("Agg")
import matplotlib.pyplot as plt

PROMPTS = Path("tests/data/prompts.jsonl")
EVERY_S = 5.0
SETTLE_S = 30.0  # for requests whose client has gone
GROWTH, LEAST_MIB = 0.02, 8.0


def main() -> int:
    options = _options()
    options.out.mkdir(parents=True, exist_ok=True)
    prompts = read_prompts(options.prompts)
    with serving(options.config, options.out / "service.log", drafting=True) as url:
        clients, memory = Clients(url, prompts, options.clients), Memory(os.getpid())
        clients.start()
        begin = time.monotonic()
        while time.monotonic() - begin < 60 * options.minutes:
            time.sleep(EVERY_S)
            memory.sample()
            done, faults = clients.counts.total(), len(clients.faults)
            print(f"{time.monotonic() - begin:6.0f} s  {done} requests, {faults} faults", file=sys.stderr, flush=True)
        clients.stop()
        health = _settled(url)
    growth = memory.growth()
    grown = {name: mib for name, mib in growth.items() if mib > max(LEAST_MIB, GROWTH * memory.mib[name][-1])}
    pages = health["kv_pages"]
    result = {
        **head(options.config.stem, __package__),
        "requests": dict(sorted(clients.counts.items())),
        "faults": clients.faults,
        "tokens": health["generated_tokens"],
        "preemptions": health["preemptions"],
        "pages": pages,
        "growth_mib": {name: round(mib, 1) for name, mib in growth.items()},
        "grown": grown,
        "seconds": memory.seconds,
        "mib": {name: [round(x, 1) for x in values] for name, values in memory.mib.items()},
        "passed": not (clients.faults or grown or pages["free"] != pages["total"] or health["running"]),
    }
    (options.out / f"soak-{options.config.stem}.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    _draw(result, options.out)
    told = {key: result[key] for key in ("requests", "faults", "tokens", "pages", "growth_mib", "grown", "passed")}
    print(json.dumps(told, indent=1))
    return 0 if result["passed"] else 1


def _settled(url: str) -> dict[str, Any]:
    """The health once nothing runs any more, or when it has had its time."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        health: dict[str, Any] = httpx.get(f"{url}/health", timeout=30).json()
        if health["running"] == health["waiting"] == 0 or time.monotonic() > deadline:
            return health
        time.sleep(0.5)


def _draw(result: dict[str, Any], folder: Path) -> None:
    figure, axis = plt.subplots(figsize=(9, 4.4), layout="constrained")
    for name, values in result["mib"].items():
        axis.plot([s / 60 for s in result["seconds"]], values, label=name.rpartition(" ")[0])
    axis.set(
        title=f"{sum(result['requests'].values())} requests, {len(result['faults'])} faults",
        xlabel="minutes",
        ylabel="MiB",
    )
    axis.set_yscale("log")
    axis.legend(fontsize=7, ncols=3)
    bare(axis)
    figure.savefig(folder / f"soak-{result['name']}.png", dpi=110)
    plt.close(figure)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--prompts", type=Path, default=PROMPTS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
