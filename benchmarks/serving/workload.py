"""Which prompts are sent at which concurrency: the same to the service and to its peers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import cycle, islice

LEAST_GROUPS = 2  # so that each mode is first once


def requests(prompts: Sequence[str], concurrency: int) -> list[str]:
    """Return the prompts, each at least once, repeated to make whole groups of `concurrency`."""
    groups = max(LEAST_GROUPS, math.ceil(len(prompts) / concurrency))
    return list(islice(cycle(prompts), groups * concurrency))
