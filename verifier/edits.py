"""Penalties, biases and bans of tokens: how a row's history changes its logits, as in vLLM. Knows no model and no draw.

In this order, before any temperature: `bias` is added; a token of the history has its logit divided by `repetition` where it
is above 0, else multiplied; `frequency` is taken off for each time that the answer has the token, and `presence` once. A
banned token is never drawn. A row's history is what plain decoding would have there: its sequence's and its own path's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ddtree.kernels.tree import WORD_BITS
from ddtree.verifier.batch import LogitEdits, TokenValues

BANNED = torch.finfo(torch.float32).min  # finite: a row that is not is no row to draw from
_BLOCK = 1 << 24  # logits that are edited at once: a few times so many numbers are held beside them


def edit(logits: Tensor, positions: Tensor, tokens: Tensor, ancestors: Tensor, edits: LogitEdits) -> Tensor:
    """The logits to draw from, [M, V] float32. Waits for no device.

    Args:
        logits: [M, V], any float type; where it is float32 it is written over.
        positions: [M] absolute position of the token to draw.
        tokens: [T] of the batch.
        ancestors: [M, W] of each row, see `Rows`.
    """
    logits = logits.float()
    shape = len(edits.repetition), logits.shape[1]
    history = _dense(edits.history, shape, otherwise=-1)  # -1: not even in the prompt
    bias, banned = _dense(edits.bias, shape, otherwise=0), _dense(edits.banned, shape, otherwise=0)
    # Only these tokens, and those of a row's tree, can change; one that comes twice gets the same logit twice.
    listed = torch.cat((edits.history.token, edits.bias.token, edits.banned.token)).long()
    if len(listed) > shape[1]:
        listed = torch.arange(shape[1], device=logits.device)
    for part in torch.arange(len(edits.row), device=logits.device).split(max(1, _BLOCK // shape[1])):
        row, sequence = edits.row[part].long(), edits.sequence[part, None].long()
        own, on_path = _path(tokens, ancestors[row], edits.root[part].long(), shape[1])
        ids = torch.cat((listed.expand(len(row), -1), own), 1)
        drafted = logits.new_zeros(len(row), shape[1]).scatter_add_(1, own, on_path.float()).gather(1, ids)
        before = history[sequence, ids]
        seen, times = (before >= 0) | (drafted > 0), before.clamp(min=0) + drafted
        x = logits[row[:, None], ids] + bias[sequence, ids]
        repetition = edits.repetition[sequence]
        x = torch.where(seen, torch.where(x > 0, x / repetition, x * repetition), x)
        x = x - edits.frequency[sequence] * times - edits.presence[sequence] * (times > 0)
        never = (banned[sequence, ids] > positions[row, None]) & torch.isfinite(x)
        logits[row[:, None], ids] = x.masked_fill(never, BANNED)
    return logits


def _dense(values: TokenValues, shape: tuple[int, int], otherwise: float) -> Tensor:
    """[A, V] float32."""
    table = values.value.new_full(shape, otherwise)
    table[values.sequence.long(), values.token.long()] = values.value
    return table


def _path(tokens: Tensor, ancestors: Tensor, root: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Of R rows the tokens of their trees, [R, N] int64, and which of them are on the row's path, [R, N] bool: never the root,
    which is part of its sequence's history."""
    bits = (ancestors[:, :, None] >> torch.arange(WORD_BITS, device=ancestors.device)) & 1
    node = torch.arange(ancestors.shape[1] * WORD_BITS, device=root.device)
    own = tokens[(root[:, None] + node).clamp(max=len(tokens) - 1)].long()
    own = own.clamp(0, vocab_size - 1)  # of a padding node it may be anything
    return own, (bits.flatten(1) == 1) & (node > 0)
