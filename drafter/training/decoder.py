"""Continuous batching: many answers at once over a static cache, one CUDA graph per step. Knows no prompts and no files."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ddtree.drafter.training.ops import decode_attention, gumbel_argmax
from ddtree.drafter.training.ragged import Tokens
from ddtree.drafter.training.target import Target
from ddtree.kernels.noise import KeyedNoise

STEPS_PER_LOOK = 16  # decode steps between two looks at what is finished
FILL_TOKENS = 1 << 16  # of one prefill batch, padding included
MEMORY_SHARE = 0.6  # of the free device memory, for the cache


@dataclass(frozen=True)
class Job:
    key: int  # the caller's
    prompt: Tokens
    temperature: float  # 0: greedy
    max_new: int
    seed: int = 0  # of its draws, where noise is keyed


@dataclass(frozen=True)
class Answer:
    job: Job
    tokens: Tokens  # prompt and answer, the stop token included where it stopped


class Decoder:
    """`slots` sequences of at most `size` tokens. All state lives in fixed tensors, so that a graph can replay a step."""

    def __init__(
        self,
        target: Target,
        stop: Sequence[int],
        slots: int,
        size: int,
        seed: int,
        *,
        keyed_noise: KeyedNoise | None = None,
    ) -> None:
        """`keyed_noise`: draw by each job's seed and the token's position, as the verifier does; None: by `seed` and the step."""
        self.target, self.size, device = target, size, target.device
        self.keyed_noise = keyed_noise
        self.slots = _affordable(target, slots, size)
        shape = (len(target.layers), self.slots, target.kv_heads, size, target.head_dim)
        self.keys = torch.zeros(shape, dtype=target.dtype, device=device)
        self.values = torch.zeros_like(self.keys)
        self.rows = torch.arange(self.slots, device=device)
        self.stop = torch.tensor(list(stop), device=device)
        self.token, self.position, self.limit, self.seeds = (torch.zeros_like(self.rows) for _ in range(4))
        self.step_seed = torch.full((1,), 1_000_003 * seed + 1, dtype=torch.int64, device=device)
        self.temperature = torch.zeros(self.slots, dtype=torch.float32, device=device)
        self.done = torch.ones(self.slots, dtype=torch.bool, device=device)
        self.history = torch.zeros(self.slots, size + 1, dtype=torch.int64, device=device)
        self.graph: torch.cuda.CUDAGraph | None = None
        if device.type == "cuda" and keyed_noise is None:  # whose kernel is compiled when it is first called
            self._capture()

    @torch.no_grad()
    def generate(
        self,
        jobs: Iterator[Job],
        deadline: float,
        *,
        wait_for_all: bool = False,
        look: Callable[[int], None] = lambda tokens: None,
    ) -> Iterator[Answer]:
        """Answers in the order in which they finish, until the jobs or the time (`time.time()`) end.

        What is open at the deadline is given up to where it got, if that is more than 24 tokens. When the jobs end, the
        last two per cent of the slots are not waited for, unless `wait_for_all`. `look` is told now and then how many
        tokens the open answers have.
        """
        free, busy, drained = list(range(self.slots)), dict[int, Job](), False
        while time.time() < deadline:
            while free and not drained and (len(free) >= max(1, self.slots // 32) or not busy):
                batch, width = list[Job](), 0
                while len(batch) < len(free) and (width + 32) * (len(batch) + 1) < FILL_TOKENS:
                    job = next(jobs, None)
                    if job is None:
                        drained = True
                        break
                    batch.append(job)
                    width = max(width, len(job.prompt))
                if batch:
                    rows, free = free[: len(batch)], free[len(batch) :]
                    self._fill(rows, batch)
                    busy.update(zip(rows, batch, strict=True))
            if not busy or (drained and not wait_for_all and len(busy) < self.slots // 50):
                return
            for _ in range(STEPS_PER_LOOK):
                self.graph.replay() if self.graph else self._step()
            done, position = self.done.tolist(), self.position.tolist()
            ready = [row for row in busy if done[row]]
            for row, tokens in zip(ready, self._read(ready), strict=True):
                yield Answer(busy.pop(row), tokens[: position[row] + 1])
            free += ready
            look(sum(position[row] + 1 - len(job.prompt) for row, job in busy.items()))
        rows, position = list(busy), self.position.tolist()
        for row, tokens in zip(rows, self._read(rows), strict=True):
            if position[row] - len(busy[row].prompt) > 24:
                yield Answer(busy[row], tokens[: position[row] + 1])

    def _read(self, rows: list[int]) -> Tokens:
        return self.history[torch.tensor(rows, dtype=torch.int64, device=self.target.device)].cpu().numpy()

    def _attend_one(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        keys, values = self.keys[layer], self.values[layer]
        keys[self.rows, :, self.position] = k[:, :, 0]
        values[self.rows, :, self.position] = v[:, :, 0]
        return decode_attention(q[:, :, 0], keys, values, self.position, scale)[:, :, None]

    def _step(self) -> None:
        """Draws the next token of every slot that is not done."""
        hidden = self.target.hidden(self.token[:, None], self.position[:, None], self._attend_one)[:, 0]
        drawn = self._draw(F.linear(hidden, self.target.head))
        live = ~self.done
        self.position += live
        self.token.copy_(torch.where(live, drawn, self.token))
        self.history[self.rows, self.position] = self.token
        self.done |= (self.token[:, None] == self.stop).any(1) | (self.position >= self.limit)

    def _draw(self, logits: Tensor) -> Tensor:
        """`[B, V]` → `[B]`."""
        if self.keyed_noise is None:
            drawn = gumbel_argmax(logits, self.temperature, self.step_seed)
            self.step_seed += 1
            return drawn
        sampled = self.temperature > 0
        noise = self.keyed_noise.rows(self.seeds, self.position + 1)
        scaled = logits.float() / self.temperature.where(sampled, 1.0)[:, None]
        return torch.where(sampled[:, None], scaled + noise, scaled).argmax(-1)

    @torch.no_grad()
    def _capture(self) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        self.graph = graph
        self.done.fill_(True)

    def _fill(self, rows: list[int], jobs: list[Job]) -> None:
        """Prefills prompts into slots; their first token is drawn by the next step."""
        device, lengths = self.target.device, [len(job.prompt) for job in jobs]
        width = min(-(-max(lengths) // 32) * 32, self.size)
        padded = np.zeros((len(jobs), width), np.int64)
        for i, job in enumerate(jobs):
            padded[i, : lengths[i]] = job.prompt
        ids, slots = torch.from_numpy(padded).to(device), torch.tensor(rows, device=device)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
            self.keys[layer, slots, :, :width] = k
            self.values[layer, slots, :, :width] = v
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, scale=scale)

        self.target.hidden(ids, torch.arange(width, device=device).expand(len(jobs), -1), attend)
        last = torch.tensor(lengths, device=device) - 1
        self.history[slots, :width] = ids
        self.position[slots] = last
        self.token[slots] = ids[torch.arange(len(jobs), device=device), last]
        self.temperature[slots] = torch.tensor([job.temperature for job in jobs], device=device)
        self.seeds[slots] = torch.tensor([job.seed for job in jobs], device=device)
        room = torch.tensor([job.max_new for job in jobs], device=device)
        self.limit[slots] = (last + room).clamp(max=self.size - 1)
        self.done[slots] = False


def _affordable(target: Target, slots: int, size: int) -> int:
    """At most `slots`, as far as the cache fits into the device's free memory."""
    if target.device.type != "cuda":
        return slots
    each = 2 * len(target.layers) * target.kv_heads * size * target.head_dim * target.dtype.itemsize
    fits = int(MEMORY_SHARE * torch.cuda.mem_get_info(target.device)[0]) // each
    if fits < 1:
        raise ValueError(f"the device has no memory for one sequence of {size} tokens: give a smaller context")
    return min(slots, fits)
