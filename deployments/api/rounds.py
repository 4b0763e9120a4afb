"""A verified round as the chunks of a stream have it. Knows token names; knows no engine and no HTTP."""

from __future__ import annotations

from math import exp
from typing import Any

from ddtree.deployments.api.logprobs import TokenNames
from ddtree.deployments.requests import VerifiedRound


def round_object(number: int, told: VerifiedRound, names: TokenNames) -> dict[str, Any]:
    """Return `ddtree.round` of a chunk; `number` counts the rounds of its choice, from 0. docs/api.md says what is in it."""

    def named(token: int) -> dict[str, Any]:
        return {"id": token, "text": names.name(token)}

    nodes: list[dict[str, Any]] = []
    for token, parent, score in zip(told.tokens, told.parents, told.scores, strict=True):
        node = named(token) | {"parent": None, "score": 0.0, "probability": 1.0}
        if parent >= 0:
            chance = min(1.0, exp(score - told.scores[parent]))
            node |= {"parent": parent, "score": round(score, 4), "probability": round(chance, 4)}
        nodes.append(node)
    return {
        "number": number,
        "budget": told.budget,
        "nodes": nodes,
        "accepted": list(told.accepted),
        "bonus": None if told.bonus is None else named(told.bonus),
        "seconds": {stage: round(seconds, 6) for stage, seconds in told.seconds.items()},
    }
