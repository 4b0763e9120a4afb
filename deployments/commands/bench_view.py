"""A benchmark result as a table. Knows the result's keys and the terminal; measures nothing."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from ddtree.deployments.requests import STAGES

BAR = 30  # characters of the longest bar


def show(result: dict[str, Any], console: Console) -> None:
    """Print the figures, where the time of a round goes, and the acceptance histogram."""
    settings = result["settings"]
    how = f"budget {settings['budget']}, concurrency {settings['concurrency']}"
    table = Table(title=f"{result['model']}: {result['prompts']} prompts, {how}")
    for column in ("", "plain", "speculative"):
        table.add_column(column, justify="right" if column else "left")
    table.add_row("tokens/s", f"{result['plain_tokens_per_s']:.1f}", f"{result['speculative_tokens_per_s']:.1f}")
    table.add_row("speed-up", "1.00", f"[bold]{result['speedup']:.2f}[/bold]")
    table.add_row("tokens per round", "1.00", f"{result['acceptance_length']:.2f}")
    for name in ("tokens", "rounds"):
        table.add_row(name, *(str(result[name][mode]) for mode in ("plain", "speculative")))
    per_round = result["stage_ms_per_round"]
    for stage in STAGES:
        table.add_row(f"{stage}, ms a round", *(f"{per_round[mode][stage]:.1f}" for mode in ("plain", "speculative")))
    table.add_row(
        "rest, ms a round", *(f"{result['rest_ms_per_round'][mode]:.1f}" for mode in ("plain", "speculative"))
    )
    for name in ("prefill", "queue"):
        seconds = result[f"{name}_seconds"]
        table.add_row(f"{name}, s", f"{seconds['plain']:.2f}", f"{seconds['speculative']:.2f}")
    console.print(table)
    if synthetic := result["synthetic_drafter"]:
        told = ", ".join(f"{key} {value}" for key, value in synthetic.items())
        console.print(f"SYNTHETIC DRAFTER ({told}): the speculative figures are no drafter's", style="bold red")
    same = result["identical"]
    console.print(f"identical token ids: [{'green' if same == 1 else 'red'}]{same:.1%}[/] of prompts")
    console.print("rounds by accepted draft tokens", style="dim")
    for line in histogram(result["acceptance_histogram"]):
        console.print(line, style="dim", highlight=False)


def histogram(counts: list[int]) -> list[str]:
    """Return a bar per number of accepted draft tokens, up to the last that occurred."""
    used = max((i for i, count in enumerate(counts) if count), default=-1)
    most = max(counts, default=0)
    return [f"{i:>3} {'▇' * -(-BAR * counts[i] // most):<{BAR}} {counts[i]}" for i in range(used + 1)]
