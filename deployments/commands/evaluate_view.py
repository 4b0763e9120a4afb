"""The result of `ddtree eval-drafter` as tables. Knows the result's keys and the terminal; measures nothing."""

from __future__ import annotations

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

BAR = 20  # characters of the longest bar


def show(result: dict[str, Any], console: Console, per_set: bool = False) -> None:
    """Print tokens per round of all sets, then what is behind them for the chain and the tree that `settings.detail` names: of
    all sets together and, if asked, of each as well."""
    detail = result["settings"]["detail"]
    sets = result["sets"] if per_set and len(result["sets"]) > 1 else {}
    tables = [_lengths(result)]
    for name, found in [*sets.items(), ("all", result["all"])]:
        chain, tree = found["columns"]["chain"], found["columns"][str(detail)]
        if not chain["rounds"]:
            continue
        tables.append(_histogram(name, chain, tree, detail))
        tables.append(_depths(name, chain, tree, detail))
        tables.append(_cells(name, tree, detail))
    for table in tables:  # their titles and captions may be wider than they are
        title, table.title, caption, table.caption = table.title, None, table.caption, None
        console.print(title, style="bold", highlight=False)
        console.print(table)
        if caption:
            console.print(caption, style="dim", highlight=False)
        console.print()


def _lengths(result: dict[str, Any]) -> Table:
    s = result["settings"]
    how = "greedy" if not s["temperature"] else f"temperature {s['temperature']:g}"
    if s["noise_share"]:
        how += f", candidates ranked with {s['noise_share']:g} of the noise"
    if s["preceding"]:
        how += f", after {s['preceding']:,} tokens of other prompts"
    budgets = [str(budget) for budget in s["budgets"]]
    table = _table(
        f"{result['drafter']} for {result['target']}: tokens per round, {how}",
        *("set", "prompts", "left out", "rounds", "chain"),
        *(f"tree {budget}" for budget in budgets),
    )
    rows = list(result["sets"].items())
    for name, found in [*rows, ("all", result["all"])] if len(rows) > 1 else rows:
        columns = found["columns"]
        lengths = (f"{columns[key]['acceptance_length']:.2f}" for key in ("chain", *budgets))
        if name == "all":
            table.add_section()
        table.add_row(name, str(found["prompts"]), str(found["left_out"]), f"{columns['chain']['rounds']:,}", *lengths)
    seconds = result["seconds"]
    took = f"{seconds['answers']:.0f} s for answers, {seconds['rounds']:.0f} s for rounds"
    table.caption = (
        f"bonus token included · rounds: of the chain, within the first {s['tokens']} tokens of each answer\n"
        f"{s['dtype']} on {s['device']}, {s['top_k']} candidates per depth · {took}"
    )
    return table


def _histogram(name: str, chain: dict[str, Any], tree: dict[str, Any], detail: int) -> Table:
    counts = chain["histogram"], tree["histogram"]
    table = _table(f"{name}: rounds by accepted draft tokens", "accepted", "chain", "", f"tree {detail}", "")
    for bar in (2, 4):
        table.columns[bar].justify = "left"
    deepest = max(i for i, both in enumerate(zip(*counts, strict=True)) if any(both))
    for accepted in range(deepest + 1):
        cells = []
        for histogram in counts:
            n, most = histogram[accepted], max(histogram)
            cells += [f"{n:,}", "▇" * -(-BAR * n // most)]
        table.add_row(str(accepted), *cells)
    return table


def _depths(name: str, chain: dict[str, Any], tree: dict[str, Any], detail: int) -> Table:
    heads = ("depth", "chain", "predicted", "accepted", f"tree {detail}", "predicted", "accepted")
    table = _table(f"{name}: chance of a further token, where all before it were accepted", *heads)
    rows = {row["depth"]: _chances(row) for row in chain["by_depth"]}
    trees = {row["depth"]: _chances(row) for row in tree["by_depth"]}
    nothing = ("", "", "")
    for depth in sorted(rows.keys() | trees.keys()):
        table.add_row(str(depth), *rows.get(depth, nothing), *trees.get(depth, nothing))
    table.caption = (
        "chain, tree: rounds that came there · predicted: by the drafter, for all nodes that the tree has there"
    )
    return table


def _chances(row: dict[str, Any]) -> tuple[str, str, str]:
    return f"{row['reached']:,}", f"{row['predicted']:.3f}", f"{row['accepted']:.3f}"


def _cells(name: str, tree: dict[str, Any], detail: int) -> Table:
    """Rows are cells of what the drafter says; the last columns tell depths apart."""
    by_depth = tree["calibration_by_depth"]
    depths = [f"{row['depth']}{'+' if row['and_deeper'] else ''}" for row in by_depth]
    table = _table(
        f"{name}: calibration of the nodes of tree {detail} whose parents were accepted",
        *("drafter says", "nodes", "predicted", "accepted"),
        *depths,
    )
    for cell in tree["calibration"]:
        same = [next((c for c in row["cells"] if c["above"] == cell["above"]), None) for row in by_depth]
        table.add_row(
            f"{cell['above']:.2f} – {cell['to']:.2f}",
            f"{cell['nodes']:,}",
            f"{cell['predicted']:.3f}",
            f"{cell['accepted']:.3f}",
            *(f"{100 * c['accepted']:.0f}" if c else "" for c in same),
        )
    table.add_section()
    errors = [f"{100 * row['calibration_error']:.0f}" if row["cells"] else "" for row in by_depth]
    table.add_row("error", "", "", f"{tree['calibration_error']:.3f}", *errors)
    table.caption = "1 …: of those at this depth, in % · error: expected calibration error"
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left", no_wrap=True)
    return table
