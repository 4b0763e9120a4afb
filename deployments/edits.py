"""Lays out what changes the logits of a step's sequences: their penalties, biases, bans and token counts as `LogitEdits`.

Knows requests and rows; the paths of trees it leaves to the target, which counts along them.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from ddtree.deployments.requests import EditParams
from ddtree.deployments.scheduler import Entry
from ddtree.deployments.sequence import Sequence
from ddtree.verifier.batch import LogitEdits, TokenValues

_Values = tuple[Iterable[int], Iterable[float]]  # tokens, and a number for each


def lay_out_edits(entries: list[Entry], offsets: list[int], trees: int, drawn: list[int]) -> LogitEdits | None:
    """`offsets` [S+1] of the entries' rows; wanted are all rows of the first `trees` entries and the last row of each `drawn`
    one, in this order. None where no sequence has anything to edit."""
    found = [(i, edits) for i in [*range(trees), *drawn] if (edits := _active(entries[i].sequence)) is not None]
    if not found:
        return None
    sequences = [entries[i].sequence for i, _ in found]
    place = {i: offsets[trees] + k for k, i in enumerate(drawn)}  # of a prompt's row among the wanted ones
    first = [place.get(i, offsets[i]) for i, _ in found]
    counts = [1 if i in place else offsets[i + 1] - offsets[i] for i, _ in found]
    return LogitEdits(
        row=torch.from_numpy(
            np.concatenate([np.arange(at, at + n, dtype=np.int32) for at, n in zip(first, counts, strict=True)])
        ),
        sequence=torch.from_numpy(np.repeat(np.arange(len(found), dtype=np.int32), counts)),
        root=torch.from_numpy(np.repeat(np.array([offsets[i] for i, _ in found], np.int32), counts)),
        history=_token_values([(s.counts or {}, (s.counts or {}).values()) for s in sequences]),
        bias=_token_values([([t for t, _ in e.logit_bias], [x for _, x in e.logit_bias]) for _, e in found]),
        banned=_token_values([_banned(s, e) for s, (_, e) in zip(sequences, found, strict=True)]),
        repetition=_float32([e.repetition_penalty for _, e in found]),
        frequency=_float32([e.frequency_penalty for _, e in found]),
        presence=_float32([e.presence_penalty for _, e in found]),
    )


def _active(sequence: Sequence) -> EditParams | None:
    """What it asks for, if that can still change anything."""
    edits = sequence.request.sampling.edits
    if edits and (edits.penalizes or edits.logit_bias or _first_free(sequence, edits) > len(sequence.tokens)):
        return edits
    return None


def _banned(sequence: Sequence, edits: EditParams) -> _Values:
    tokens = {*sequence.request.stop_token_ids, *edits.ignored_stops}
    return tokens, [_first_free(sequence, edits)] * len(tokens)


def _first_free(sequence: Sequence, edits: EditParams) -> int:
    """The first position where a stop token may stand."""
    return sequence.answer_begin + edits.min_tokens


def _token_values(each: list[_Values]) -> TokenValues:
    tokens = [np.fromiter(tokens, np.int32) for tokens, _ in each]
    return TokenValues(
        sequence=torch.from_numpy(np.repeat(np.arange(len(each), dtype=np.int32), [len(part) for part in tokens])),
        token=torch.from_numpy(np.concatenate(tokens)),
        value=torch.from_numpy(np.concatenate([np.fromiter(values, np.float32) for _, values in each])),
    )


def _float32(values: list[float]) -> torch.Tensor:
    return torch.from_numpy(np.array(values, np.float32))
