"""Which rows of a step have log-probabilities that somebody wants, and whose they are when they come.

Knows requests and rows; what a log-probability is, is the target's business.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np
import torch

from ddtree.deployments.requests import TokenLogprobs
from ddtree.deployments.scheduler import Entry
from ddtree.verifier.batch import LogprobRows, Logprobs


@dataclass(frozen=True)
class _Part:
    """Consecutive rows of one entry."""

    begin: int  # the first, among those that are wanted in the step
    rows: int
    top: int  # most probable tokens that its request wants beside each


@dataclass(frozen=True)
class LogprobLayout:
    """The rows of a step, and where each entry's are in what comes of them. An entry that asks for none is not there."""

    rows: LogprobRows
    _drawn: dict[int, _Part]
    _prompt: dict[int, _Part]

    def of_drawn(self, entry: int, nodes: Items[int], found: Logprobs) -> list[TokenLogprobs]:
        """Those of the tokens that were drawn at these nodes of the entry's tree, or at the end of its prompt: node 0."""
        part = self._drawn.get(entry)
        return [] if part is None else _pick(found, [part.begin + node for node in nodes], part.top)

    def of_prompt(self, entry: int, found: Logprobs) -> list[TokenLogprobs]:
        """Those of the prompt tokens that follow the entry's rows."""
        part = self._prompt.get(entry)
        return [] if part is None else _pick(found, range(part.begin, part.begin + part.rows), part.top)


def lay_out_logprobs(entries: list[Entry], offsets: list[int], trees: int, drawn: list[int]) -> LogprobLayout | None:
    """Arguments as for `edits.lay_out_edits`. None where no sequence wants any."""
    asking = [i for i, entry in enumerate(entries) if entry.sequence.request.logprobs is not None]
    prompts = [i for i in range(trees, len(entries)) if entries[i].sequence.request.prompt_logprobs is not None]
    if not asking and not prompts:
        return None
    wanted: list[int] = []
    row: list[int] = []
    token: list[int] = []
    of_drawn: dict[int, _Part] = {}
    of_prompt: dict[int, _Part] = {}
    place = {i: offsets[trees] + k for k, i in enumerate(drawn)}  # of a prompt's row among the wanted ones
    for i in asking:
        if i < trees or i in place:
            begin, count = (place[i], 1) if i in place else (offsets[i], offsets[i + 1] - offsets[i])
            of_drawn[i] = _Part(len(wanted), count, entries[i].sequence.request.logprobs or 0)
            wanted += range(begin, begin + count)
    for i in prompts:
        sequence = entries[i].sequence
        if new := sequence.unscored(entries[i].rows):
            of_prompt[i] = _Part(len(wanted) + len(row), len(new), sequence.request.prompt_logprobs or 0)
            row += [offsets[i] + at - sequence.computed for at in new]
            token += sequence.tokens[new.start + 1 : new.stop + 1]
    parts = [*of_drawn.values(), *of_prompt.values()]
    if not parts:
        return None
    rows_of_step = LogprobRows(_int32(wanted), _int32(row), _int32(token), max(part.top for part in parts))
    return LogprobLayout(rows_of_step, of_drawn, of_prompt)


def _pick(found: Logprobs, at: Items[int], top: int) -> list[TokenLogprobs]:
    rows = torch.tensor(at)
    values, ids, ranks = found.values[rows, : top + 1], found.ids[rows, : top + 1], found.rank[rows]
    return [
        TokenLogprobs(own, rank, tuple(zip(tokens[1:], others, strict=True)))
        for (own, *others), tokens, rank in zip(values.tolist(), ids.tolist(), ranks.tolist(), strict=True)
    ]


def _int32(values: list[int]) -> torch.Tensor:
    return torch.from_numpy(np.array(values, np.int32))
