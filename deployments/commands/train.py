"""`ddtree train-drafter`: the options of a training run as command-line options, its progress as bars.

The options, their defaults and their help are TrainOptions' own: a field added there is an option here.
"""

from __future__ import annotations

import inspect
from dataclasses import MISSING, fields
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from rich.console import Console

from ddtree.deployments.commands.bars import stage_bars
from ddtree.deployments.models import checkpoint_dir
from ddtree.drafter.training import TrainOptions
from ddtree.drafter.training import train_drafter as train

TARGET = "smollm2-135m-instruct"


def train_drafter(**options: Any) -> None:
    """Train a drafter for a target: prompts, the target's answers, training, a checkpoint with its model card."""
    from ddtree.verifier.model_dir import resolve

    console = Console()
    try:
        if options["initial"]:
            options["initial"] = checkpoint_dir(options["initial"], "--initial")
        options["target_dir"] = resolve(options.pop("target"))
        given: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in options.items()}
        chosen = TrainOptions(**given)
        with stage_bars(console) as report:
            result = train(chosen, report)
    except (ValueError, OSError) as error:
        Console(stderr=True).print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(1) from None
    console.print(f"the result is in {result}", soft_wrap=True)


def _signature() -> inspect.Signature:
    """Return one keyword per field of TrainOptions, as Typer reads them; the target by name or directory."""
    hints = get_type_hints(TrainOptions)
    target = typer.Option(help="Embedded model's name or Hugging Face directory.")
    parameters = [_parameter("target", str, target, TARGET)]
    hints["initial"] = str | None  # a name as well
    for field in fields(TrainOptions):
        if field.name == "target_dir":
            continue
        default = inspect.Parameter.empty if field.default is MISSING else field.default
        text = str(field.metadata["help"])
        option = typer.Option(help=f"{text[0].upper()}{text[1:]}.")
        kind = _typer_type(hints[field.name])
        parameters.append(_parameter(field.name, kind, option, list(default) if default == () else default))
    return inspect.Signature(parameters)


def _parameter(name: str, kind: Any, option: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])


def _typer_type(kind: Any) -> Any:
    """Return `list[X]` for `tuple[X, ...]`, the type itself otherwise."""
    return list[get_args(kind)[0]] if get_origin(kind) is tuple else kind  # type: ignore[misc]


train_drafter.__signature__ = _signature()  # type: ignore[attr-defined]
