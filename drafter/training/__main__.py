"""`python -m ddtree.drafter.training`: the options of `TrainOptions` as flags, progress as lines."""

from __future__ import annotations

import argparse
import signal
import time
import typing
from collections.abc import Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from types import UnionType

from ddtree.drafter.training import TrainOptions, train_drafter


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


class Lines:
    """Prints progress, at most every `pause` seconds within a stage; ends the run once a signal asked for it."""

    def __init__(self, pause: float = 10.0) -> None:
        self.begun, self.pause = time.monotonic(), pause
        self.stage, self.printed, self.stopping = "", 0.0, False

    def stop(self, number: int, frame: object) -> None:
        """A signal handler."""
        self.stopping = True

    def __call__(self, stage: str, fraction: float, message: str) -> None:
        now = time.monotonic()
        if stage != self.stage or fraction >= 1.0 or now - self.printed > self.pause or self.stopping:
            print(f"[{now - self.begun:7.1f} s] {stage:8} {fraction:4.0%} {message}", flush=True)
            self.stage, self.printed = stage, now
        if self.stopping:
            raise SystemExit("stopped by a signal; the same command goes on from here")


def main(arguments: Sequence[str] | None = None) -> Path:
    """Parses, trains, and says where the checkpoint is."""
    options, lines = TrainOptions(**vars(parser().parse_args(arguments))), Lines()
    signal.signal(signal.SIGTERM, lines.stop)
    done = train_drafter(options, lines)
    print(done, flush=True)
    return done


if __name__ == "__main__":
    main()
