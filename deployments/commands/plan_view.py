"""A plan as tables. Knows the plan's values and the terminal; computes nothing but units."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from ddtree.deployments.commands.plan import Plan
from ddtree.deployments.roofline import Step

GIB = 2**30
GB = 1e9


def show(plan: Plan, console: Console) -> None:
    """Print what the deployment needs, where its memory goes, and its rounds."""
    console.print(f"[bold]{plan.config}[/] {plan.hardware}", highlight=False, soft_wrap=True)
    drafter = f", drafter {plan.drafter} ({plan.drafter_facts})" if plan.drafter else ", no drafter"
    console.print(f"target {plan.target} ({plan.target_facts}){drafter}", style="dim", highlight=False, soft_wrap=True)
    console.print(_weights(plan))
    console.print(_memory(plan))
    console.print(_tokens(plan), highlight=False, soft_wrap=True)
    if plan.points:
        console.print(_rounds(plan))
    for note in plan.notes:
        console.print(f"• {note}", style="dim", highlight=False, soft_wrap=True)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    return table


def _weights(plan: Plan) -> Table:
    memory = plan.memory
    where = "GPU" if plan.gpu else "rank"
    table = _table("target weights", "", "parameters, M", "GB", f"GB a {where}")
    for part in memory.weights:
        cells = (f"{part.parameters / 1e6:,.1f}", f"{part.bytes / GB:,.2f}", f"{part.bytes_per_gpu / GB:,.2f}")
        table.add_row(part.name, *cells)
    table.add_section()
    total = sum(part.bytes for part in memory.weights)
    numbers = (f"{memory.parameters / 1e6:,.1f}", f"{total / GB:,.2f}", f"{memory.weight_bytes_per_gpu / GB:,.2f}")
    table.add_row("all", *numbers)
    if memory.active_parameters != memory.parameters:
        table.add_row("of which a token meets", f"{memory.active_parameters / 1e6:,.1f}", "", "")
    return table


def _memory(plan: Plan) -> Table:
    loads = plan.memory.loads
    table = _table("memory, GiB", "", *(load.place for load in loads))
    for name in dict.fromkeys(name for load in loads for name in load.fixed):
        table.add_row(name, *(f"{load.fixed[name] / GIB:,.2f}" if name in load.fixed else "" for load in loads))
    caches = (plan.kv_tokens * load.per_token / GIB for load in loads)
    table.add_row(f"caches of {plan.kv_tokens:,} tokens", *(f"{size:,.2f}" for size in caches))
    table.add_row("  bytes a token", *(f"{load.per_token:,}" for load in loads))
    if plan.gpu:
        table.add_section()
        table.add_row("may be filled", *(f"{plan.memory_per_gpu / GIB:,.2f}" for _ in loads))
    return table


def _tokens(plan: Plan) -> str:
    memory = plan.memory
    kv = f"KV tokens: [bold]{plan.kv_tokens:,}[/] of {memory.kv_bytes_per_token:,} bytes on each rank"
    if drafter := memory.drafter:
        size = f"{drafter.parameters / 1e6:,.1f} M parameters"
        kv += f"\ndrafter: {size}, {drafter.context_per_token:,} bytes of context a token"
    kinds = ", ".join(f"{name} {tokens:,}" for name, tokens in plan.kv_tokens_by_gpu.items())
    kv += f"\nKV tokens on the same number of: {kinds}" if kinds else ""
    if not plan.fits:
        kv += (
            f"\n[red]does not fit[/]: the longest sequence and its tree take {memory.one_sequence:,} tokens; lower "
            "target.max_context, raise gpu_memory_fraction or tensor_parallel_size, or take larger GPUs"
        )
    return kv


def _rounds(plan: Plan) -> Table:
    assert plan.gpu is not None
    title = (
        f"rounds on {plan.gpu.name}, ms, at {plan.points[0].acceptance_length:g} tokens a round, budget {plan.budget}"
    )
    table = _table(title, "load", "plain", "draft", "weights", "attn", "other", "round", "even at", "speed-up", "tok/s")
    table.caption = (
        "load: batch × context, ✗ above the KV tokens · even at: the acceptance length from which drafting pays"
    )
    table.caption_justify = "left"
    for point in plan.points:
        step = point.speculative
        parts = _parts(step)
        table.add_row(
            f"{point.batch}×{point.context // 1024}K{'' if point.fits else ' [red]✗[/]'}",
            f"{1e3 * point.plain.seconds:.1f}",
            *(f"{1e3 * part:.1f}" for part in (*parts, step.seconds)),
            f"{point.break_even:.2f}",
            f"[bold]{point.speedup:.2f}[/]",
            f"{point.tokens_per_s:,.0f}",
        )
    return table


def _parts(step: Step) -> tuple[float, ...]:
    draft = step.draft + step.draft_attention
    return draft, step.matrices + step.experts, step.attention, step.all_reduce + step.messages
