"""Training a drafter for a target: prompts, answers, loss, loop, figures. Nothing here imports the verifier.

`train_drafter` is in `ddtree.drafter.training.pipeline`, which needs torch and transformers; the options need neither.
"""

from ddtree.drafter.training.options import STAGES, Report, TrainOptions

__all__ = ["STAGES", "Report", "TrainOptions"]
