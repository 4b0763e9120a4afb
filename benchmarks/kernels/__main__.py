"""Times every CUDA kernel beside its peers, all in one run on one GPU.

    python -m benchmarks.kernels --out DIR [--peers DIR] [--quick]
        [--only topk,noise,build,path,select,accept,compact,mla,gqa,round]

Results are compared with the reference (attention with float64) first, and what is wrong is not timed. Writes kernels.json (every
figure), kernels.md (tables) and two plots; prints the bars. Exit status 1 where a bar is not met. Peers: see peers.py.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import torch

from ddtree.deployments.commands.machine import Machine, installed
from ddtree.kernels import cuda

from . import accept, build, compact, gqa, mla, noise, path, plot, rounds, select, topk
from .measure import Rates
from .peers import FILES, VERSION, Peers
from .report import Report

SECTIONS = {
    "topk": topk.run,
    "noise": noise.run,
    "build": build.run,
    "path": path.run,
    "select": select.run,
    "accept": accept.run,
    "compact": compact.run,
    "mla": mla.run,
    "gqa": gqa.run,
    "round": rounds.run,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--peers", type=Path, help="folder with the files of the wheel sglang-kernel")
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, separated by commas")
    parser.add_argument("--quick", action="store_true", help="a few cases of each section")
    options = parser.parse_args()
    chosen = options.only.split(",")
    if unknown := set(chosen) - set(SECTIONS):
        parser.error(f"no section {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    if not torch.cuda.is_available():
        parser.error("no CUDA GPU")
    cuda.library()  # compiled here rather than under a clock; without it nothing is worth timing

    torch.manual_seed(0)
    peers = Peers.load(options.peers)
    report = Report(Rates.measure(), options.quick)
    seconds = {}
    for name in chosen:
        begin = time.perf_counter()
        SECTIONS[name](report, peers)
        torch.cuda.empty_cache()
        seconds[name] = round(time.perf_counter() - begin, 1)
        print(f"{name}: {seconds[name]} s", file=sys.stderr, flush=True)
    if {"build", "accept", "compact", "mla"} <= set(chosen):
        rounds.share(report)
    absent = [FILES[name] for name, there in vars(peers).items() if not there]
    if absent:
        report.remarks.append(f"Absent, so their columns are missing: {', '.join(absent)} of {VERSION}.")
    report.remarks.append(f"Matmul rate at the end of the run: {Rates.measure().matmul:.0f} TFLOP/s.")

    options.out.mkdir(parents=True, exist_ok=True)
    about = {
        "gpu": torch.cuda.get_device_name(),
        "machine": asdict(Machine.read()),
        "versions": {name: installed(name) for name in ("torch", "triton", "numpy")}
        | {"python": platform.python_version(), "cuda": torch.version.cuda, "peers": VERSION},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": seconds,
    }
    result = about | report.json()
    (options.out / "kernels.json").write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    (options.out / "kernels.md").write_text(f"{about['gpu']}, {about['date']}. {report.markdown()}", encoding="utf-8")
    plot.draw(result, options.out)
    print(report.summary())
    return 0 if all(bar.holds for bar in report.bars) else 1


if __name__ == "__main__":
    sys.exit(main())
