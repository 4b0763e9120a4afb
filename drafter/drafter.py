"""The drafter at run time: one ragged forward pass over many sequences with cached contexts.

The new context rows of all items are fused and their keys and values computed in one batch; the blocks
[bonus, MASK, …] of all items with a bonus go through every layer in one batch, attention alone runs per sequence;
slots 1 … of each block yield the candidates. Nothing is kept of a block, and nothing of a call that fails.
Of the target it knows only the embedding and the lm_head; it knows no trees and no requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ddtree.drafter.block_attention import block_attention, keys_seen
from ddtree.drafter.checkpoint import load_published
from ddtree.drafter.config import DrafterInfo
from ddtree.drafter.context import SequenceContext
from ddtree.drafter.dflash import DFlashLayer
from ddtree.drafter.items import Candidates, DraftItem, FeatureSlice, check_items
from ddtree.drafter.rotary import rotary_table
from ddtree.drafter.target_ends import TargetEnds
from ddtree.kernels import topk_logprobs
from ddtree.kernels.packed_linear import pack, pack_linears

__all__ = ["Candidates", "DraftItem", "Drafter", "FeatureSlice"]


@dataclass(frozen=True)
class _Work:
    """A checked item and the context it extends; a new context joins the drafter's state when the call succeeds."""

    item: DraftItem
    context: SequenceContext
    rows: slice  # of its new context among the fused rows of the call

    @property
    def new_rows(self) -> int:
        return self.rows.stop - self.rows.start


class Drafter:
    """A DFlash model with the contexts of the sequences it drafts for. One caller at a time."""

    def __init__(
        self,
        checkpoint_dir: str | Path,
        target_dir: str | Path,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.bfloat16,
        top_k: int = 64,
        threads: int | None = None,
    ) -> None:
        """Loads a checkpoint and the ends of its target.

        Args:
            checkpoint_dir: a DFlash checkpoint (see checkpoint.py).
            target_dir: the target's Hugging Face directory.
            top_k: candidates per position (K), at most the vocabulary.
            threads: CPU threads of this process's torch; None leaves them alone.
        Raises:
            ValueError: a checkpoint or target that cannot be used, or not with each other.
        """
        if threads is not None:
            torch.set_num_threads(threads)
        self.info = DrafterInfo.read(checkpoint_dir)
        self._device, self._dtype, self._top_k = torch.device(device), dtype, min(top_k, self.info.vocab_size)
        ends = TargetEnds.load(target_dir, self.info, dtype=dtype, device=self._device)
        self._embedding, self._lm_head = ends.embedding, pack(_linear(ends.lm_head))
        self._model = load_published(checkpoint_dir, dtype=dtype, device=self._device)
        pack_linears(self._model)
        self._layers = [cast(DFlashLayer, layer) for layer in self._model.layers]
        self._contexts: dict[str, SequenceContext] = {}

    @property
    def sequences(self) -> int:
        """Sequences whose context is held."""
        return len(self._contexts)

    def release(self, sequences: Iterable[str]) -> None:
        """Forgets sequences. One that is not held is no error: a drafter may have joined after it began."""
        for sequence in sequences:
            self._contexts.pop(sequence, None)

    @torch.inference_mode()
    def draft(self, items: Sequence[DraftItem], features: Sequence[Tensor]) -> Candidates:
        """Feeds context and drafts.

        Args:
            items: distinct sequences, with or without a bonus token.
            features: each `[T, n·d]`, the outputs of `info.target_layer_ids` side by side, any floating dtype.
        Returns:
            candidates on the drafter's device.
        Raises:
            ValueError: names the sequence and what is wrong; no sequence has changed then.
        """
        check_items(items, features, {name: held.end for name, held in self._contexts.items()}, self.info)
        works = self._works(items)
        self._feed(works, features)
        candidates = self._draft([work for work in works if work.item.bonus is not None])
        for work in works:
            work.context.commit(work.new_rows)
            self._contexts[work.item.sequence] = work.context
        return candidates

    def _works(self, items: Sequence[DraftItem]) -> list[_Work]:
        works, first = [], 0
        for item in items:
            if item.restart:
                start = item.context[0].position if item.context else 0
                context = SequenceContext(self.info, dtype=self._dtype, device=self._device, start=start)
            else:
                context = self._contexts[item.sequence]
            context.reserve(item.new_rows + self.info.block_size)
            works.append(_Work(item, context, slice(first, first + item.new_rows)))
            first += item.new_rows
        return works

    def _feed(self, works: list[_Work], features: Sequence[Tensor]) -> None:
        """Writes keys and values of all new context rows into their sequences' scratch rows."""
        slices = [part for work in works for part in work.item.context if part.rows]
        if not slices:
            return
        rows = torch.cat([features[part.source][part.rows].to(self._device, self._dtype) for part in slices])
        context = self._model.fuse(rows)
        cos, sin = self._rotary([p for part in slices for p in range(part.position, part.position + len(part.rows))])
        for i, layer in enumerate(self._layers):
            k, v = layer.context_kv(context, cos, sin)
            for work in works:
                work.context.write(i, 0, k[work.rows], v[work.rows])

    def _draft(self, works: list[_Work]) -> Candidates:
        """One block per sequence, over its context and the rows just fed."""
        info, slots = self.info, self.info.block_size
        if not works:
            shape = (0, info.horizon, self._top_k)
            return Candidates(
                torch.empty(shape, device=self._device), torch.empty(shape, dtype=torch.int32, device=self._device)
            )
        ids = [token for work in works for token in [work.item.bonus, *[info.mask_token_id] * info.horizon]]
        x = F.embedding(torch.tensor(ids, device=self._device), self._embedding) * info.embedding_scale
        cos, sin = self._rotary([work.item.position + slot for work in works for slot in range(slots)])
        for i, (layer, span) in enumerate(zip(self._layers, info.spans, strict=True)):
            q, k, v = (rows.unflatten(0, (-1, slots)) for rows in layer.block_qkv(x, cos, sin))
            attended = []
            for b, work in enumerate(works):
                work.context.write(i, work.new_rows, k[b], v[b])
                keys, values = work.context.view(i, work.new_rows + slots, keys_seen(span, slots))
                attended.append(block_attention(q[b], keys, values, span))
            x = layer.finish(x, torch.cat(attended))
        hidden = self._model.norm(x.unflatten(0, (-1, slots))[:, 1:]).flatten(0, 1)
        logprobs, best = topk_logprobs(self._logits(hidden), self._top_k)
        return Candidates(*(rows.unflatten(0, (-1, info.horizon)) for rows in (logprobs, best)))

    def _logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self._lm_head(hidden)
        if self.info.logit_scale != 1.0:
            logits = logits * self.info.logit_scale
        cap = self.info.logit_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def _rotary(self, positions: list[int]) -> tuple[Tensor, Tensor]:
        at = torch.tensor(positions, device=self._device)
        return rotary_table(at, self.info.rope, self.info.head_dim, self._dtype)


def _linear(weight: Tensor) -> nn.Linear:
    """A layer without bias around `weight [out, in]`, which is not copied."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer
