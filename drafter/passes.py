"""One pass of a fixed size over the paged contexts: its inputs at fixed addresses, and its CUDA graph where it has one.

New context rows go in, then the blocks are drafted. What a pass has no row or block for is padding, which reads and
writes pages that belong to no sequence. Knows slots and page tables, not whose they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ddtree.drafter.items import Candidates
from ddtree.drafter.stack import Stack
from ddtree.kernels import Rows, verify_attn
from ddtree.kernels.staging import Staging
from ddtree.kernels.waiting import never_waiting

PAGE = 64  # slots: what the attention kernels read at a time


class ContextPool:
    """Keys and values of all layers in pages; slot = page * PAGE + offset. The last pages are for padding."""

    def __init__(self, stack: Stack, pages: int) -> None:
        config = stack.config
        self.scratch = np.arange(pages, pages - (-config.block_size // PAGE))  # enough for one block
        shape = (config.num_layers, pages + len(self.scratch), PAGE, 2 * config.num_kv_heads, config.head_dim)
        # keys before values; zeros, as what no row may see is still multiplied by 0
        self.kv = torch.zeros(shape, dtype=stack.dtype, device=stack.device)


class Place(NamedTuple):
    """Where the context of a sequence is: in pages with room for so many rows from position `start` on."""

    start: int
    pages: np.ndarray  # [P] int32
    rows: np.ndarray  # [2, P * PAGE] int64, slot and position of every row that there is room for

    @staticmethod
    def empty(start: int) -> Place:
        return Place(start, np.empty(0, dtype=np.int32), np.empty((2, 0), dtype=np.int64))

    def extended(self, taken: list[int]) -> Place:
        """With more pages."""
        more, room = np.array(taken, dtype=np.int32), self.rows.shape[1]
        slots = (more[:, None] * np.int64(PAGE) + np.arange(PAGE)).ravel()
        rows = np.stack((slots, np.arange(self.start + room, self.start + room + len(slots))))
        return Place(self.start, np.concatenate((self.pages, more)), np.concatenate((self.rows, rows), 1))


class Extension(NamedTuple):
    """What a pass adds to one sequence: context rows, and a block that is dropped again."""

    place: Place  # with room for both
    old: int  # context rows that it has
    length: int  # and those that it has when the new ones are in
    bonus: int | None  # None: no block

    def fed(self) -> Extension:
        """What is left to do when the rows are in."""
        return self._replace(old=self.length)


class Pass:
    """Takes up to `rows` new context rows and up to `blocks` blocks."""

    def __init__(self, stack: Stack, pool: ContextPool, *, rows: int, blocks: int, width: int) -> None:
        """`width`: the most pages that a sequence has."""
        config, slots = stack.config, stack.config.block_size
        self.rows, self.blocks = rows, blocks
        self._stack, self._pool = stack, pool
        fields = {
            # what a row is made from (context: a row of the features; blocks: a token), its slot and its position
            "rows": (torch.int64, (3, rows + blocks * slots)),
            "lengths": (torch.int32, (2, blocks)),  # of the context; of what a block's last row sees, itself apart
            "tables": (torch.int32, (blocks, width)),
        }
        self._inputs = Staging(fields, stack.device)
        host = self._inputs.host["rows"]
        self._sources, self._context, self._blocks = host[0, :rows], host[1:, :rows], host[1:, rows:]
        self._ids = host[0, rows:].reshape(-1, slots)
        self._ids[:] = config.mask_token_id
        block = np.arange(slots)
        self._spare = np.stack((pool.scratch[0] * PAGE + block, block))  # slots and positions of a padding block
        self._padding = np.repeat(self._spare[:, :1], rows, 1)  # of padding rows
        self._shown: list[np.ndarray] = [block] * blocks  # whose pages each row of the tables has
        wide = len(config.target_layer_ids) * config.hidden_size
        self._gathered = self._inputs.device["rows"][0, :rows]
        self._features = torch.zeros(rows, wide, dtype=stack.dtype, device=stack.device)
        self._layouts = {causal: self._layout(causal) for causal in {span.causal for span in config.spans}}
        self._graph: torch.cuda.CUDAGraph | None = None
        self._captured: list[Candidates] = []  # of the first 0, 1, … blocks

    def _layout(self, causal: bool) -> dict[str, Any]:
        """The fields of `Rows` that never change.

        A causal block is like a prompt chunk. Of one that sees all of itself, the rows become heads of one row, the
        sequence's last, because no row of `verify_attn` sees one that comes after it.
        """
        each, device = self._stack.config.block_size if causal else 1, self._stack.device
        return {
            "row_offsets": torch.arange(0, (self.blocks + 1) * each, each, dtype=torch.int32, device=device),
            "q_len": torch.full((self.blocks,), each, dtype=torch.int32, device=device),
            "seq_len": self._inputs.device["lengths"][0 if causal else 1],
            "page_table": self._inputs.device["tables"],
            "page_size": PAGE,
            "causal": torch.ones(self.blocks, dtype=torch.bool, device=device),
            "ancestors": torch.empty(self.blocks * each, 0, dtype=torch.int32, device=device),
        }

    def load(self, extensions: Sequence[Extension], sources: Sequence[int], features: Tensor | None) -> None:
        """Fills in the inputs. The rows `sources` of features `[T, n·d]`, on the device in the model's dtype, are gathered at
        once: they are the new context of all extensions.

        Between two drafts other code runs, so every call made here is a slow one: few calls, whatever they do.
        """
        drafting = [extension for extension in extensions if extension.bonus is not None]
        n = len(sources)
        self._inputs.wait()
        self._sources[:n] = sources
        self._sources[n:] = 0
        new = [place.rows[:, old:length] for place, old, length, _ in extensions]
        np.concatenate([*new, self._padding[:, n:]], 1, out=self._context)
        self._load_blocks(drafting)
        self._inputs.send()
        if n and features is not None:
            torch.index_select(features, 0, self._gathered, out=self._features)

    def _load_blocks(self, drafting: list[Extension]) -> None:
        lengths, tables = self._inputs.host["lengths"], self._inputs.host["tables"]
        b, slots = len(drafting), self._stack.config.block_size
        if drafting:
            self._ids[:b, 0] = [extension.bonus for extension in drafting]
            own = [place.rows[:, length : length + slots] for place, _, length, _ in drafting]
            np.concatenate(own, 1, out=self._blocks[:, : b * slots])
            lengths[0, :b] = [extension.length for extension in drafting]
            np.add(lengths[0, :b], slots - 1, out=lengths[1, :b])
            for row, extension in enumerate(drafting):
                pages = extension.place.pages
                if self._shown[row] is not pages:
                    self._shown[row] = tables[row, : len(pages)] = pages
        if b < self.blocks:
            scratch = self._pool.scratch
            self._blocks[:, b * slots :].reshape(2, -1, slots)[:] = self._spare[:, None]
            lengths[:, b:] = [[0], [slots - 1]]
            tables[b:, : len(scratch)] = scratch
            self._shown[b:] = [scratch] * (self.blocks - b)

    def run(self, blocks: int) -> Candidates:
        """Candidates `[blocks, L, K]` of the first blocks loaded; with a graph they are overwritten by its next run."""
        with self._stack.clock:
            if self._graph is None:
                return self._forward().first(blocks)
            self._graph.replay()
            return self._captured[blocks]

    def capture(self, memory: Any) -> None:
        """From now on `run` replays a graph whose memory is in the pool `memory` (a `torch.cuda.graph_pool_handle`).

        Raises:
            WaitsForDevice: something in the pass waits for the device, which a graph cannot hold.
        """
        self.load([], [], None)
        stream = torch.cuda.Stream(self._stack.device)
        stream.wait_stream(torch.cuda.current_stream(self._stack.device))
        with torch.cuda.stream(stream):
            with never_waiting():
                self._forward()  # also makes what is made once: library, handles, tables
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=memory, stream=stream, capture_error_mode="thread_local"):
                candidates = self._forward()
        self._graph, self._captured = graph, [candidates.first(blocks) for blocks in range(self.blocks + 1)]

    @torch.inference_mode()
    def _forward(self) -> Candidates:
        rows, stack = self.rows, self._stack
        made_from, slots, positions = self._inputs.device["rows"]
        layouts = {causal: Rows(**layout) for causal, layout in self._layouts.items()}
        cache = _Cache(stack, self._pool.kv, slots[:rows], slots[rows:], layouts)
        cos, sin = stack.rotary(positions)
        if rows:
            stack.feed(self._features, cos[:rows], sin[:rows], cache)
        if not self.blocks:
            return stack.no_candidates()
        return stack.draft(made_from[rows:], cos[rows:], sin[rows:], cache)


@dataclass(frozen=True)
class _Cache:
    """The pool, through the slots and tables of one pass: a `Cache`."""

    stack: Stack
    kv: Tensor
    context_slots: Tensor
    block_slots: Tensor
    rows: dict[bool, Rows]  # by whether a layer is causal

    def feed(self, kv: Tensor) -> None:
        self.kv.flatten(1, 2).index_copy_(1, self.context_slots, kv.transpose(0, 1))

    def attend(self, layer: int, q: Tensor, kv: Tensor) -> Tensor:
        config, cache = self.stack.config, self.kv[layer]
        cache.flatten(0, 1).index_copy_(0, self.block_slots, kv)
        keys, values = cache.chunk(2, 2)
        causal, slots, kv_heads = config.spans[layer].causal, config.block_size, config.num_kv_heads
        if not causal:  # [B, slots, kv_heads, group, head_dim] → [B, kv_heads * slots * group, head_dim]
            q = q.unflatten(0, (-1, slots)).unflatten(2, (kv_heads, -1)).transpose(1, 2).flatten(1, 3)
        out, _ = verify_attn(q, keys, values, self.rows[causal], scale=config.head_dim**-0.5)
        if not causal:
            out = out.unflatten(1, (kv_heads, slots, -1)).transpose(1, 2).flatten(0, 1).flatten(1, 2)
        return out
