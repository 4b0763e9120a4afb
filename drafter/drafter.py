"""The drafter at run time: candidates after the bonus tokens of many sequences, from contexts that it keeps.

One ragged pass a call: the new context rows of all items become keys and values, the blocks [bonus, MASK, …] of all
items with a bonus go through the layers, slots 1 … of each block yield the candidates. Nothing is kept of a block, and
nothing of a call that fails. Of the target it knows only the embedding and the lm_head; it knows no trees and no requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ddtree.drafter.checkpoint import load_published
from ddtree.drafter.config import DrafterInfo
from ddtree.drafter.growing import GrowingContexts
from ddtree.drafter.items import Candidates, DraftItem, FeatureSlice, check_items
from ddtree.drafter.paged import PagedContexts
from ddtree.drafter.pages import ContextFull
from ddtree.drafter.path_head import PathHead
from ddtree.drafter.stack import Stack
from ddtree.drafter.target_ends import TargetEnds

__all__ = ["Candidates", "ContextFull", "DraftItem", "Drafter", "FeatureSlice"]


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
        context_tokens: int = 65_536,
        max_sequences: int = 64,
        paged: bool | None = None,
        graphs: bool = True,
        path_head: bool = True,
    ) -> None:
        """Loads a checkpoint and the ends of its target.

        Args:
            checkpoint_dir: a DFlash checkpoint (see checkpoint.py).
            target_dir: the target's Hugging Face directory.
            top_k: candidates per position (K), at most the vocabulary.
            threads: CPU threads of this process's torch; None leaves them alone.
            context_tokens, max_sequences: where contexts are paged, the size of their pool and of the largest call.
            paged: contexts in one pool of pages; None: on a GPU, unless a layer has a sliding window. Such checkpoints
                run sequence by sequence, as on a CPU, which keeps a GPU waiting for the host.
            graphs: run paged contexts as CUDA graphs where that is possible.
            path_head: use the checkpoint's, where it has one.
        Raises:
            ValueError: a checkpoint or target that cannot be used, or not with each other or these sizes.
        """
        if threads is not None:
            torch.set_num_threads(threads)
        self.info = DrafterInfo.read(checkpoint_dir)
        device = torch.device(device)
        ends = TargetEnds.load(target_dir, self.info, dtype=dtype, device=device)
        model = load_published(checkpoint_dir, dtype=dtype, device=device)
        head = PathHead.load(self.info, dtype=dtype, device=device) if path_head else None
        stack = Stack(model, ends, min(top_k, self.info.vocab_size), head)
        self._clock = stack.clock
        if paged is None:
            paged = device.type == "cuda" and all(span.window is None for span in self.info.spans)
        self._contexts: GrowingContexts | PagedContexts
        if paged:
            sizes = {"context_tokens": context_tokens, "max_sequences": max_sequences}
            self._contexts = PagedContexts(stack, **sizes, graphs=graphs)
        else:
            self._contexts = GrowingContexts(stack)

    @property
    def sequences(self) -> int:
        """Sequences whose context is held."""
        return len(self._contexts)

    @property
    def compute_seconds(self) -> float:
        """What its device has computed in drafts so far."""
        return self._clock.seconds

    def release(self, sequences: Iterable[str] | None) -> None:
        """Forgets sequences, None: all. One that is not held is no error: a drafter may have joined after it began."""
        self._contexts.release(sequences)

    def draft(self, items: Sequence[DraftItem], features: Sequence[Tensor]) -> Candidates:
        """Feeds context and drafts.

        Args:
            items: distinct sequences, with or without a bonus token.
            features: each `[T, n·d]`, the outputs of `info.target_layer_ids` side by side, any floating dtype.
        Returns:
            candidates on the drafter's device, enqueued on its current stream. The next call may overwrite them.
        Raises:
            ValueError: names the sequence and what is wrong; no sequence has changed then.
            ContextFull: the pool of contexts is full; no sequence has changed then.
        """
        check_items(items, features, self._contexts.end, self.info)
        return self._contexts.draft(items, features)
