"""Training a drafter for a target: prompts, answers, loss, loop, figures. Nothing here imports the verifier.

Importing this needs neither torch nor transformers; `train_drafter` does.
"""

from __future__ import annotations

from pathlib import Path

from ddtree.drafter.training.options import STAGES, Report, TrainOptions, quiet

__all__ = ["STAGES", "Report", "TrainOptions", "train_drafter"]


def train_drafter(options: TrainOptions, report: Report = quiet) -> Path:
    """Trains a DFlash drafter for a target: prompts, the target's answers, training, checkpoint with figures.

    Call it again with the same options to go on after an interruption.

    Args:
        options: see `TrainOptions`.
        report: called with (stage, fraction done, one line) about once a second, from this thread; what it raises ends
            the run, and nothing done so far is lost.
    Returns:
        The checkpoint's folder (bf16, published form), or out_dir where `stop_after` ends earlier.
    Raises:
        ValueError: out_dir belongs to a run with other options, a target that cannot be trained for, too little data.
    """
    from ddtree.drafter.training.pipeline import run

    return run(options, report)
