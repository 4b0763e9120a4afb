"""`python -m ddtree.drafter.training`: the options of `TrainOptions` as flags, progress as lines."""

from __future__ import annotations

import argparse
import time
import typing
from collections.abc import Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from types import UnionType

from ddtree.drafter.training.options import TrainOptions


def parser() -> argparse.ArgumentParser:
    """One flag per option."""
    made = argparse.ArgumentParser(
        prog="python -m ddtree.drafter.training", description="Train a drafter for a target."
    )
    kinds = typing.get_type_hints(TrainOptions)
    for option in fields(TrainOptions):
        flag, kind = "--" + option.name.replace("_", "-"), kinds[option.name]
        text = option.metadata["help"].replace("%", "%%")
        required = option.default is MISSING
        args = typing.get_args(kind)
        if kind is bool:
            made.add_argument(flag, action=argparse.BooleanOptionalAction, default=option.default, help=text)
        elif typing.get_origin(kind) is tuple:
            made.add_argument(flag, nargs="*", type=args[0], default=option.default, help=text)
        else:
            of = args[0] if typing.get_origin(kind) in (typing.Union, UnionType) else kind
            default = None if required else option.default
            made.add_argument(flag, type=of, required=required, default=default, help=text)
    return made


def main(arguments: Sequence[str] | None = None) -> Path:
    """Parses, trains, and says where the checkpoint is."""
    options = TrainOptions(**vars(parser().parse_args(arguments)))
    from ddtree.drafter.training.pipeline import train_drafter  # torch: only once the options are right

    begun = time.monotonic()

    def report(stage: str, fraction: float, message: str) -> None:
        print(f"[{time.monotonic() - begun:7.1f} s] {stage:8} {fraction:4.0%} {message}", flush=True)

    done = train_drafter(options, report)
    print(done, flush=True)
    return done


if __name__ == "__main__":
    main()
