"""The target's own token at each wanted row: a function of (seed, position, token id, logits, parameters), of no batch.

Gumbel-max: y = argmax(logits / T + g(seed, position, id)) over the kept tokens is a draw from their softmax. Processors
act as in vLLM: temperature, min-p, top-k, then top-p on what those left; at least one token is kept. A kept set is always
"every token whose logit reaches a threshold": tokens of equal logit are kept or dropped together (vLLM: top-k likewise,
top-p in sort order), so no sort order shows in a draw.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from ddtree.kernels.noise import KeyedNoise, gumbel
from ddtree.verifier.batch import SamplingRows

GREEDY_BELOW = 1e-5  # temperature
_BLOCK = 1 << 26  # logits that a GPU draws from at once: it holds a few numbers for each
_HEADS = (256, 4096)  # how many of the largest logits to look at before all of them are sorted


def all_greedy(rows: SamplingRows) -> bool:
    """Whether no row needs a random number."""
    return bool(_greedy(rows).all())


def greedy(logits: Tensor) -> Tensor:
    """[M] int32: each row's most probable token, the lowest of equal ones; -1 where a logit of the row is NaN or infinite.

    Waits for no device. logits: [M, V], any float type.
    """
    logits = logits.float()
    return torch.where(finite(logits), _argmax(logits), -1).int()


def finite(logits: Tensor) -> Tensor:
    """[M] bool: whether every logit of a row is."""
    return torch.isfinite(logits.amax(-1)) & torch.isfinite(logits.amin(-1))


def sample(logits: Tensor, positions: Tensor, rows: SamplingRows, noise: KeyedNoise | None = None) -> Tensor:
    """Draw one token per row.

    Args:
        logits: [M, V], any float type; row m belongs to `rows`' entry m (`rows.row` is not used).
        positions: [M] absolute position of the token to draw: the row's own position + 1.
        noise: cache of noise rows for this V; None computes them afresh, with the same result.
    Returns: [M] int32; -1 where a logit of the row is NaN or infinite.
    """
    if not len(logits):
        return torch.empty(0, dtype=torch.int32, device=logits.device)
    logits, noise = logits.float(), noise or KeyedNoise(logits.shape[1], logits.device)
    if logits.is_cuda:
        parts = [slice(at, at + _BLOCK // logits.shape[1]) for at in range(0, len(logits), _BLOCK // logits.shape[1])]
        return torch.cat([_at_once(logits[part], positions[part], _part(rows, part), noise) for part in parts])
    y = greedy(logits)
    drawn = ((y >= 0) & ~_greedy(rows)).nonzero().squeeze(1)
    if len(drawn):
        x = _take(logits, drawn) / rows.temperature[drawn, None]
        seed, position = rows.seed[drawn].long(), positions[drawn].long()
        top_k, top_p = rows.top_k[drawn].long(), rows.top_p[drawn].double()
        if rows.min_p is not None:
            least = x.amax(-1) + rows.min_p[drawn].log()
            x = x.masked_fill(x < least[:, None], -torch.inf)
        y[drawn] = _draw(x, seed, position, top_k, top_p, noise).int()
    return y


def _at_once(logits: Tensor, positions: Tensor, rows: SamplingRows, noise: KeyedNoise) -> Tensor:
    """As `sample`, of all rows alike: a GPU waits longer for the host to look at rows than it takes for them. The host asks it
    once which rows are truncated."""
    drawn = ~_greedy(rows)
    x = logits / rows.temperature.where(drawn, 1.0)[:, None]
    if rows.min_p is not None:
        least = x.amax(-1) + rows.min_p.log()
        x = x.masked_fill(x < least.where(drawn, -torch.inf)[:, None], -torch.inf)
    part = (_truncated(rows.top_k, rows.top_p, x.shape[1]) & drawn).nonzero().squeeze(1)
    if len(part):
        threshold = x.new_full((len(x),), -torch.inf)
        threshold[part] = _threshold(x[part], rows.top_k[part].long(), rows.top_p[part].double())
        x.masked_fill_(x < threshold[:, None], -torch.inf)
    found = noise.rows(rows.seed.long(), positions.long()).masked_fill_(~drawn[:, None], 0.0)
    return torch.where(finite(logits), _argmax(x + found), -1).int()


def _part(rows: SamplingRows, part: slice) -> SamplingRows:
    each: dict[str, Any] = {field.name: getattr(rows, field.name) for field in fields(rows)}
    each = {name: None if values is None else values[part] for name, values in each.items()}
    return SamplingRows(**each)


def _truncated(top_k: Tensor, top_p: Tensor, vocab_size: int) -> Tensor:
    """[R] bool: the rows whose kept set is smaller than the vocabulary."""
    return ((top_k > 0) & (top_k < vocab_size)) | (top_p < 1)


def _greedy(rows: SamplingRows) -> Tensor:
    return (rows.temperature < GREEDY_BELOW) | (rows.top_p <= 0) | (rows.top_k == 1)


def _draw(x: Tensor, seed: Tensor, position: Tensor, top_k: Tensor, top_p: Tensor, noise: KeyedNoise) -> Tensor:
    """[R] int64: the Gumbel-max draws of rows x [R, V], which it may overwrite."""
    vocab_size = x.shape[1]
    truncated = _truncated(top_k, top_p, vocab_size)
    y = torch.empty_like(seed)
    whole = (~truncated).nonzero().squeeze(1)
    if len(whole):
        keys = zip(whole.tolist(), seed[whole].tolist(), position[whole].tolist(), strict=True)
        for i, row_seed, row_position in keys:
            x[i] += noise.row(row_seed, row_position)
        y[whole] = _argmax(_take(x, whole))
    part = truncated.nonzero().squeeze(1)
    if len(part):
        x, seed, position = _take(x, part), seed[part], position[part]
        kept = x >= _threshold(x, top_k[part], top_p[part])[:, None]
        row, ids = kept.nonzero(as_tuple=True)
        score = x[row, ids] + gumbel(seed[row], position[row], ids)
        best = score.new_full((len(x),), -torch.inf).scatter_reduce(0, row, score, "amax")
        tied = ids.masked_fill(score < best[row], vocab_size)
        y[part] = ids.new_full((len(x),), vocab_size).scatter_reduce(0, row, tied, "amin")
    return y


def _threshold(x: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """[R] the smallest logit that top-k, then top-p keep in rows x [R, V]; `top_k` ≤ 0 and `top_p` ≥ 1 are off."""
    vocab_size = x.shape[1]
    limited = (top_k > 0) & (top_k < vocab_size)
    top_k = torch.where(limited, top_k, vocab_size)
    top_p = top_p.masked_fill(top_p >= 1, torch.inf)  # 1 would drop tokens whose mass is lost in rounding
    mass = torch.zeros_like(top_p)  # of whole rows, in units of the largest token's
    for i in (~limited).nonzero().squeeze(1).split(256 if x.is_cuda else 4):  # whose float64 fits into a CPU's cache
        mass[i] = (x[i] - x[i].amax(-1, keepdim=True)).exp_().sum(-1, dtype=torch.float64)
    threshold = torch.empty_like(x[:, 0])
    pending = torch.arange(len(x), device=x.device)
    for size in (*(n for n in _HEADS if n < vocab_size), vocab_size):
        head = _take(x, pending).topk(size).values
        kth = head.gather(1, top_k[pending, None].clamp(max=size) - 1)
        in_k = head >= kth
        weight = (head - head[:, :1]).exp_().double() * in_k
        total = torch.where(limited[pending], weight.sum(-1), mass[pending])
        larger = weight.cumsum(-1) - weight  # mass of the tokens before
        kept = (in_k & (larger < (top_p[pending] * total)[:, None])).sum(-1).clamp(min=1)
        lowest = head.gather(1, kept[:, None] - 1)
        threshold[pending] = lowest.squeeze(1)
        # What lies beyond the head cannot matter once the head ends below all that counts.
        needed = torch.where(limited[pending, None], kth, lowest)
        pending = pending[(needed <= head[:, -1:]).squeeze(1)]
        if not len(pending):
            break
    return threshold


def _take(x: Tensor, rows: Tensor) -> Tensor:
    """x[rows] for distinct, ascending rows; without a copy where that is all of x."""
    return x if len(rows) == len(x) else x[rows]


def _argmax(x: Tensor) -> Tensor:
    """[M] int64: the lowest index of each row's maximum. By blocks: torch's amax is 20 times as fast as its argmax."""
    block = 256
    if x.shape[1] % block:
        return x.argmax(-1)
    blocks = x.unflatten(1, (-1, block))
    first = blocks.amax(-1).argmax(-1)
    inside = blocks[torch.arange(len(x), device=x.device), first].argmax(-1)
    return first * block + inside
