"""How many nodes the trees of a round get, where the budget is `auto`: as many as give the most tokens per second.

The service lets the nodes of all trees compete by what each is worth (`deployments/budgets.py: select`). Here all trees of a
budget are alike, so the optimum is one number for all, looked for over the whole curve. It is a little below what the
service finds, which gives good drafts more nodes, asks for fewer depths where that pays, and gives up contexts that do not.
"""

from __future__ import annotations

from collections import defaultdict
from math import log

import numpy as np

from ddtree.deployments.costs import StepSize

from .profile import Profile

COARSE = 1.25  # contexts and slownesses within this factor get the same


class Choice:
    """For one service; what was found is kept."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._tokens = [profile.acceptance.tokens(budget) for budget in range(profile.limits.max_budget + 1)]
        self._found: dict[tuple[int, int, int], int] = {}

    def budget(self, sequences: int, context: int, slowness: float) -> int:
        """Nodes of each tree of so many sequences, which have so many tokens of context in all; 0: no draft pays.

        Args:
            slowness: what a draft takes of late, in times of what it costs at one drafter that nobody else asks.
        """
        if self._profile.budget != "auto":
            return self._profile.budget
        of_context, of_slowness = round(log(context + 1, COARSE)), round(log(slowness, COARSE))
        key = sequences, of_context, of_slowness
        if key not in self._found:
            self._found[key] = self._best(sequences, int(COARSE**of_context), COARSE**of_slowness)
        return self._found[key]

    def _best(self, sequences: int, context: int, slowness: float) -> int:
        costs = self._profile.costs

        def seconds(nodes: int) -> float:
            rows = sequences * (1 + nodes)
            size = StepSize(rows, sequences, sequences * (nodes > 0), context, context * (1 + nodes))
            draft = slowness * costs.draft_s(sequences, context) if nodes else 0.0
            return draft + costs.rest_s(sequences) + costs.verify_s(size)

        return max(range(len(self._tokens)), key=lambda nodes: self._tokens[nodes] / seconds(nodes))


class Draws:
    """How many draft tokens of each tree are accepted, at random."""

    def __init__(self, profile: Profile, seed: np.random.SeedSequence) -> None:
        self._acceptance, self._random = profile.acceptance, np.random.default_rng(seed)
        self._drawn: dict[int, list[int]] = defaultdict(list)

    def accepted(self, budget: int) -> int:
        drawn = self._drawn[budget]
        if not drawn:
            chances = self._acceptance.chances(budget)
            drawn += self._random.choice(len(chances), size=4096, p=chances).tolist()
        return drawn.pop()
