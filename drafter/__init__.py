"""The DFlash drafter: model, context cache, checkpoints, training. Knows kernels, nothing of Ray or HTTP.

Only what needs no torch is exported here; the drafter itself is `ddtree.drafter.drafter.Drafter`.
"""

from ddtree.drafter.config import DrafterConfig, DrafterInfo

__all__ = ["DrafterConfig", "DrafterInfo"]
