"""The command `ddtree`: options in, functions called, tables out. Does no work itself and imports what a command needs
only when it runs, so that `ddtree --help` is quick."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ddtree.deployments.commands.bars import stage_bars
from ddtree.deployments.commands.train import train_drafter

app = typer.Typer(
    help="Speculative decoding with draft trees, output provably the target model's own.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
console = Console()

URL = "http://127.0.0.1:8000"
MODEL = "smollm2-135m-instruct"
Url = Annotated[str, typer.Option(help="Address of a running server.")]


def _budget(text: str) -> str | int:
    if text == "auto" or text.isdecimal():
        return text if text == "auto" else int(text)
    raise typer.BadParameter(f"{text!r} is neither a number of nodes nor auto")


def _budgets(text: str) -> tuple[int, ...]:
    if all(part.strip().isdecimal() for part in text.split(",")):
        return tuple(int(part) for part in text.split(","))
    raise typer.BadParameter(f"{text!r} is no list of numbers of nodes, such as 8,16,32")


Budget = Annotated[
    Any,
    typer.Option(parser=_budget, metavar="N|auto", help="Draft nodes per round; the server's default if left out."),
]


@app.command()
def serve(
    config: Annotated[Path, typer.Argument(help="A Serve config file, such as configs/smollm2-cpu.yaml.")],
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Instead of the file's port.")] = None,
) -> None:
    """Check a configuration, prepare its model and serve until interrupted."""
    from ddtree.deployments.commands.launch import run_forever

    def ready(url: str, model: str) -> None:
        question = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}
        curl = f"curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{json.dumps(question)}'"
        console.print(f"\n[bold green]{model} is ready at {url}[/]. Ask it:")
        console.print(f"  {curl}\n  ddtree chat --url {url}", soft_wrap=True, highlight=False, markup=False)

    with _faults(), _steps() as progress:
        code = run_forever(config, port, progress=progress, ready=ready)
    raise typer.Exit(code)


@app.command()
def prepare(model: Annotated[str, typer.Argument(help="Name of an embedded model.")] = MODEL) -> None:
    """Make an embedded model ready in the user's cache."""
    from ddtree.verifier import embedded

    with _faults(), _steps() as progress:
        path = embedded.prepare(model, progress)
    console.print(f"{model} is at {path}", soft_wrap=True)


@app.command()
def chat(
    url: Url = URL,
    budget: Budget = None,
    temperature: Annotated[float, typer.Option(min=0)] = 0.0,
    max_tokens: Annotated[int, typer.Option(min=1)] = 512,
    seed: Annotated[int | None, typer.Option()] = None,
    compare: Annotated[bool, typer.Option(help="Answer every message plain, then speculative.")] = False,
) -> None:
    """Talk to a running server and see the tokens gained per round. DDTREE_API_KEY is sent if it is set."""
    from ddtree.deployments.commands.chat import ChatOptions, run_chat

    with _faults():
        run_chat(ChatOptions(url, budget, temperature, max_tokens, seed, compare), console)


@app.command()
def bench(
    prompts: Annotated[Path, typer.Option(help="JSONL with prompt, question or turns on each line.")],
    url: Url = URL,
    limit: Annotated[int | None, typer.Option(min=1, help="The first so many prompts.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1)] = 128,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at a time.")] = 1,
    out: Annotated[Path | None, typer.Option("--json", help="Where to write the result.")] = None,
    budget: Budget = None,
    temperature: Annotated[float, typer.Option(min=0)] = 0.0,
    seed: Annotated[int, typer.Option()] = 0,
    record: Annotated[
        Path | None, typer.Option(help="Where to write the plain answers, for a config's drafter.synthetic.record.")
    ] = None,
) -> None:
    """Run every prompt plain and speculative against a running server and compare. DDTREE_API_KEY is sent if it is set."""
    from ddtree.deployments.commands.bench import BenchOptions, run_bench
    from ddtree.deployments.commands.bench_view import show
    from ddtree.deployments.commands.prompts import read_prompts

    with _faults():
        texts = read_prompts(prompts, limit)
        options = BenchOptions(url, texts, max_tokens, concurrency, budget, temperature, seed)
        with _bar() as bar:
            task = bar.add_task("", total=2 * len(texts))
            result, recordings = run_bench(options, lambda done, what: bar.update(task, advance=done, description=what))
        result["command"] = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
        show(result, console)
        if out:
            out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
            console.print(f"written to {out}", style="dim")
        if record:
            record.write_text("".join(json.dumps(entry) + "\n" for entry in recordings), encoding="utf-8")
            console.print(f"recorded in {record}", style="dim")


@app.command()
def plan(
    config: Annotated[Path, typer.Argument(help="A Serve config file, such as configs/qwen3-8b-1gpu.yaml.")],
    acceptance_length: Annotated[
        float, typer.Option(min=1, help="Tokens gained a round; an assumption until measured.")
    ] = 4.0,
    gpu: Annotated[str | None, typer.Option(help="Another kind than the file's: H100, H200 or B200.")] = None,
    gpu_memory_gib: Annotated[float | None, typer.Option(min=1, help="Instead of what that kind has.")] = None,
    target_config: Annotated[Path | None, typer.Option(help="The target's config.json, if it is not here.")] = None,
    drafter_config: Annotated[Path | None, typer.Option(help="The drafter's config.json, if it is not here.")] = None,
    messages_ms: Annotated[float, typer.Option(min=0, help="Control messages of a round.")] = 0.8,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Size a configuration on paper: memory, KV tokens, round times, speed-up. Needs no GPU and no weights."""
    from ddtree.deployments.commands import plan as plans
    from ddtree.deployments.commands.plan_view import show

    with _faults():
        options = plans.PlanOptions(
            gpu, gpu_memory_gib, acceptance_length, target_config, drafter_config, messages_ms / 1e3
        )
        made = plans.make_plan(config, options)
    if as_json:
        typer.echo(json.dumps(plans.as_json(made), indent=1, ensure_ascii=False))
    else:
        show(made, console)
    raise typer.Exit(0 if made.fits else 1)


@app.command()
def doctor() -> None:
    """Say what this machine is, what can run here, what is missing and how to get it."""
    from rich.markup import escape
    from rich.table import Table

    from ddtree.deployments.commands.doctor import CONFIG, can_serve, examine

    checks = examine()
    table = Table(box=None)
    for column in ("", "", "found", "how to get it"):
        table.add_column(column)
    for check in checks:
        mark = "[green]✓[/]" if check.ok else "[red]✗[/]" if check.needed else "[yellow]–[/]"
        table.add_row(mark, check.name, escape(check.found), "" if check.ok else escape(check.fix))
    console.print(table)
    ok = can_serve(checks)
    console.print(f"configs/{CONFIG} can run here." if ok else f"configs/{CONFIG} cannot run here yet: see ✗ above.")
    raise typer.Exit(0 if ok else 1)


app.command("train-drafter")(train_drafter)


@app.command("eval-drafter")
def eval_drafter(
    config: Annotated[
        Path | None, typer.Argument(help="A Serve config file, whose target and drafter are measured.")
    ] = None,
    prompts: Annotated[
        list[Path], typer.Option(help="JSONL with prompt, question or turns on each line; repeated, a set each.")
    ] = [],  # noqa: B006, Typer copies it
    target: Annotated[
        str | None,
        typer.Option(help=f"Embedded model's name or Hugging Face directory, else the file's, else {MODEL}."),
    ] = None,
    drafter: Annotated[
        str | None, typer.Option(help="A shipped checkpoint's name or a directory, else the file's.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="The first so many prompts of each set.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Answer tokens of each prompt, within which rounds begin.")] = 128,
    budgets: Annotated[
        Any, typer.Option(parser=_budgets, metavar="N,N,…", help="Nodes of the trees, besides the root.")
    ] = "8,16,32,63,255",
    detail: Annotated[
        int | None,
        typer.Option(help="The budget whose histogram and calibration are shown; the middle one if left out."),
    ] = None,
    per_set: Annotated[
        bool, typer.Option("--per-set", help="Show them for every set, not for all together only.")
    ] = False,
    temperature: Annotated[float, typer.Option(min=0)] = 0.0,
    shared_noise: Annotated[
        bool | None,
        typer.Option(
            "--shared-noise/--no-shared-noise", help="Rank candidates with the target's noise, else as the file."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the draws above temperature 0.")] = 0,
    top_k: Annotated[
        int | None, typer.Option(min=1, max=1023, help="Candidates per depth, else the file's tree.top_k.")
    ] = None,
    preceding: Annotated[
        int, typer.Option(min=0, help="Tokens of the set's other prompts before each, to measure in long contexts.")
    ] = 0,
    context: Annotated[
        int, typer.Option(min=2, help="Tokens of the longest prompt with its answer, without what precedes.")
    ] = 2048,
    device: Annotated[
        Literal["cpu", "cuda"] | None, typer.Option(help="Else the file's; without one cuda where there is one.")
    ] = None,
    dtype: Annotated[
        Literal["auto", "bfloat16", "float32"] | None, typer.Option(help="Of both models, else the file's.")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads, else the file's.")] = None,
    out: Annotated[Path | None, typer.Option("--json", help="Where to write the result.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Where to write a plot, as PNG.")] = None,
) -> None:
    """Measure a drafter offline: tokens per round, histogram, acceptance by depth, calibration. Needs no server."""
    from ddtree.deployments.commands import evaluate, evaluate_view

    with _faults():
        options = evaluate.EvaluateOptions(
            prompts=prompts,
            config=config,
            target=target,
            drafter=drafter,
            limit=limit,
            tokens=tokens,
            budgets=tuple(sorted(set(budgets))),
            detail=detail,
            temperature=temperature,
            shared_noise=shared_noise,
            seed=seed,
            top_k=top_k,
            preceding=preceding,
            context=context,
            device=device,
            dtype=dtype,
            threads=threads,
            json=out,
            plot=plot,
        )
        with stage_bars(console) as report:
            result = evaluate.run(options, report)
        result["command"] = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
        evaluate_view.show(result, console, per_set)
        if out:
            out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
            console.print(f"written to {out}", style="dim")
        if plot:
            from ddtree.deployments.commands.evaluate_plot import save_plot

            save_plot(result, plot)
            console.print(f"plotted in {plot}", style="dim")


@contextmanager
def _faults() -> Iterator[None]:
    """Turn the errors that a person can act on into one line and exit code 1."""
    from ddtree.deployments.commands.client import ServerError
    from ddtree.verifier.embedded import EmbeddedModelError

    try:
        yield
    except (ValueError, OSError, ServerError, EmbeddedModelError) as error:
        Console(stderr=True).print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(1) from None


def _bar() -> Progress:
    columns = (TextColumn("{task.description:<24}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True)


@contextmanager
def _steps() -> Iterator[Callable[[str, int, int], None]]:
    """Yield a (what, done, total) callback that draws a bar from its first call until the last step."""
    bar = _bar()
    task = bar.add_task("", total=None)

    def progress(what: str, done: int, total: int) -> None:
        bar.start()
        bar.update(task, description=what[:24], completed=done, total=total)
        if done >= total:
            bar.stop()

    try:
        yield progress
    finally:
        if bar.live.is_started:
            bar.stop()


if __name__ == "__main__":
    app()
