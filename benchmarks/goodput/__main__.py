"""Goodput: tokens per second of answers in time, when requests come at random; budgets take turns in one service.

    python -m benchmarks.goodput CONFIG --prompts FILE.jsonl --out DIR --rates 0.5,1,2 [--budgets 0,auto] [--turns 2]
        [--seconds 60] [--settle 10] [--patience 60] [--max-tokens 64] [--first 2] [--token 0.2] [--mps]

Requests come as a Poisson process, the same in every mode, whatever is answered. Those of a window count, which begins `--settle`
seconds after the first; what has no end `--patience` seconds after the last is cut off and was not in time. In time is what has
its first token within `--first` seconds and then takes `--token` seconds by token. Rates should go beyond what the service can
do. Writes goodput-NAME.json, .md and .png, anew after every window.
"""

from __future__ import annotations

import argparse
import contextlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.progress import Progress

from ..budgets.__main__ import budgets
from ..run import head, read
from ..serving.mps import multi_process_service
from ..serving.service import serving
from . import report
from .figures import Objective, figures
from .load import arrivals, send

FIELDS = (
    "rates", "budgets", "turns", "seconds", "settle", "patience", "max_tokens", "first", "token", "mps",
)  # fmt: skip


def main() -> None:
    options = _options()
    prompts, config, _ = read(options)
    options.out.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {
        **head(options.config.stem, __package__),
        "config": config.model_dump(mode="json"),
        "settings": {name: getattr(options, name) for name in FIELDS} | {"prompts": len(prompts)},
        "windows": [],
    }
    objective = Objective(options.first, options.token)
    with (
        multi_process_service() if options.mps else contextlib.nullcontext(),
        serving(options.config, options.out / "service.log", drafting=True) as url,
        Progress() as progress,
    ):
        task = progress.add_task("windows", total=len(options.rates) * options.turns * len(options.budgets))
        for rate in options.rates:
            for turn in range(options.turns):
                times = arrivals(rate, options.settle + options.seconds, seed=turn)
                asked = prompts[turn * len(prompts) // options.turns :] + prompts
                for budget in options.budgets if turn % 2 == 0 else reversed(options.budgets):
                    began, streams = send(url, asked, times, budget, options.max_tokens, options.patience)
                    begin = began + options.settle
                    found = figures(streams, begin, begin + options.seconds, objective)
                    result["windows"].append({"rate": rate, "budget": budget, "turn": turn, **asdict(found)})
                    report.write(result, options.out)
                    progress.update(task, advance=1, description=f"{rate:g} requests/s, {budget}")
    print(report.markdown(result))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL with prompt, question or turns on each line")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rates", type=_rates, required=True, help="requests a second")
    parser.add_argument("--budgets", type=budgets, default=[0, "auto"])
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=60, help="of a window")
    parser.add_argument("--settle", type=float, default=10, help="seconds before it")
    parser.add_argument("--patience", type=float, default=60, help="seconds after it")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--first", type=float, default=2, help="seconds")
    parser.add_argument("--token", type=float, default=0.2, help="seconds")
    parser.add_argument("--mps", action="store_true", help="under NVIDIA's Multi-Process Service, started for the run")
    return parser.parse_args()


def _rates(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


if __name__ == "__main__":
    main()
