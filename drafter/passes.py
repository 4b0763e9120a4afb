"""One pass of a fixed size over the paged contexts: its inputs at fixed addresses, and its CUDA graph where it has one.

New context rows go in, then the blocks are drafted. What a pass has no row or block for is padding, which reads and
writes pages that belong to no sequence. Knows slots and page tables, not whose they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

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


@dataclass(frozen=True)
class Extension:
    """What a pass adds to one sequence: r context rows, and a block that is dropped again."""

    rows: list[int]  # [r] of the features tensor
    position: int  # of the first
    slots: np.ndarray  # [≥ r + block] where the sequence goes on
    length: int  # context rows with the new ones
    pages: np.ndarray  # all that the sequence has
    bonus: int | None  # None: no block

    def fed(self) -> Extension:
        """What is left to do when the rows are in."""
        new = len(self.rows)
        return replace(self, rows=[], position=self.position + new, slots=self.slots[new:])


class Pass:
    """Takes up to `rows` new context rows and up to `blocks` blocks."""

    def __init__(self, stack: Stack, pool: ContextPool, *, rows: int, blocks: int, width: int) -> None:
        """`width`: the most pages that a sequence has."""
        config, slots = stack.config, stack.config.block_size
        self.rows, self.blocks = rows, blocks
        self._block = np.arange(slots, dtype=np.int32)
        self._stack, self._pool = stack, pool
        fields = {
            "features": (torch.int64, (rows,)),
            "context_slots": (torch.int64, (rows,)),
            "block_slots": (torch.int64, (blocks, slots)),
            "ids": (torch.int64, (blocks, slots)),
            "positions": (torch.int32, (rows + blocks * slots,)),
            "lengths": (torch.int32, (blocks,)),  # of the contexts
            "seen": (torch.int32, (blocks,)),  # by a block's last row, itself apart
            "tables": (torch.int32, (blocks, width)),
        }
        self._inputs = Staging(fields, stack.device)
        self._inputs.host["ids"][:] = config.mask_token_id
        wide = len(config.target_layer_ids) * config.hidden_size
        self._features = torch.zeros(rows, wide, dtype=stack.dtype, device=stack.device)
        self._layouts = {causal: self._layout(causal) for causal in {span.causal for span in config.spans}}
        self._graph: torch.cuda.CUDAGraph | None = None
        self._captured: Candidates | None = None

    def _layout(self, causal: bool) -> dict[str, Any]:
        """The fields of `Rows` that never change.

        A causal block is like a prompt chunk. Of one that sees all of itself, the rows become heads of one row, the
        sequence's last, because no row of `verify_attn` sees one that comes after it.
        """
        each, device = self._stack.config.block_size if causal else 1, self._stack.device
        return {
            "row_offsets": torch.arange(0, (self.blocks + 1) * each, each, dtype=torch.int32, device=device),
            "q_len": torch.full((self.blocks,), each, dtype=torch.int32, device=device),
            "seq_len": self._inputs.device["lengths" if causal else "seen"],
            "page_table": self._inputs.device["tables"],
            "page_size": PAGE,
            "causal": torch.ones(self.blocks, dtype=torch.bool, device=device),
            "ancestors": torch.empty(self.blocks * each, 0, dtype=torch.int32, device=device),
        }

    def load(self, extensions: Sequence[Extension], features: Tensor | None) -> None:
        """Fills in the inputs. Features `[T, n·d]`, on the device in the model's dtype, are gathered at once."""
        self._inputs.wait()
        host, scratch, slots = self._inputs.host, self._pool.scratch, len(self._block)
        rows: list[int] = []
        positions: list[int] = []
        firsts: list[int] = []
        for extension in extensions:
            old, new = len(rows), len(extension.rows)
            rows += extension.rows
            positions += range(extension.position, extension.position + new)
            host["context_slots"][old : old + new] = extension.slots[:new]
            if extension.bonus is not None:
                b = len(firsts)
                host["ids"][b, 0] = extension.bonus
                host["block_slots"][b] = extension.slots[new : new + slots]
                host["lengths"][b] = extension.length
                host["tables"][b, : len(extension.pages)] = extension.pages
                firsts.append(extension.position + new)
        n, b = len(rows), len(firsts)
        host["features"][:n], host["features"][n:] = rows, 0
        host["positions"][:n] = positions
        host["context_slots"][n:] = scratch[0] * PAGE
        host["positions"][self.rows :].reshape(-1, slots)[:b] = np.array(firsts, dtype=np.int32)[:, None] + self._block
        if b < self.blocks:
            host["block_slots"][b:] = scratch[0] * PAGE + self._block
            host["lengths"][b:] = 0
            host["tables"][b:, : len(scratch)] = scratch
        np.add(host["lengths"], slots - 1, out=host["seen"])
        self._inputs.send()
        if n and features is not None:
            torch.index_select(features, 0, self._inputs.device["features"], out=self._features)

    def run(self) -> Candidates:
        """Candidates `[blocks, L, K]` of what was loaded; with a graph they are overwritten by its next run."""
        if self._graph is None or self._captured is None:
            return self._forward()
        self._graph.replay()
        return self._captured

    def capture(self, memory: Any) -> None:
        """From now on `run` replays a graph whose memory is in the pool `memory` (a `torch.cuda.graph_pool_handle`).

        Raises:
            WaitsForDevice: something in the pass waits for the device, which a graph cannot hold.
        """
        self.load([], None)
        stream = torch.cuda.Stream(self._stack.device)
        stream.wait_stream(torch.cuda.current_stream(self._stack.device))
        with torch.cuda.stream(stream):
            with never_waiting():
                self._forward()  # also makes what is made once: library, handles, tables
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=memory, stream=stream, capture_error_mode="thread_local"):
                self._captured = self._forward()
        self._graph = graph

    def _forward(self) -> Candidates:
        inputs, rows, stack = self._inputs.device, self.rows, self._stack
        layouts = {causal: Rows(**layout) for causal, layout in self._layouts.items()}
        cache = _Cache(stack, self._pool.kv, inputs["context_slots"], inputs["block_slots"].flatten(), layouts)
        cos, sin = stack.rotary(inputs["positions"])
        if rows:
            stack.feed(self._features, cos[:rows], sin[:rows], cache)
        if not self.blocks:
            return stack.no_candidates()
        return stack.draft(inputs["ids"].flatten(), cos[rows:], sin[rows:], cache)


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
