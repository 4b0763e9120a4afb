"""The context cache of one sequence: growth keeps rows, scratch never becomes context by itself."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree.drafter.config import DrafterConfig
from ddtree.drafter.context import INITIAL_ROWS, SequenceContext


def rows(config: DrafterConfig, n: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(config.num_layers, 2, n, config.num_kv_heads, config.head_dim, generator=generator)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 20), st.booleans()), max_size=8))
def test_holds_what_was_committed(config: DrafterConfig, steps: list[tuple[int, int, bool]]) -> None:
    context = SequenceContext(config, dtype=torch.float32, device=torch.device("cpu"), start=5)
    held = rows(config, 0, 0)
    for seed, (new, scratch, commit) in enumerate(steps):
        written = rows(config, new + scratch, seed)
        context.reserve(new + scratch)
        for layer in range(config.num_layers):
            context.write(layer, 0, written[layer, 0, :new], written[layer, 1, :new])
            context.write(layer, new, written[layer, 0, new:], written[layer, 1, new:])
            both = torch.cat([held, written], 2)[layer].transpose(1, 2)
            for last in (None, 1, 7, 10_000):
                k, v = context.view(layer, new + scratch, last)
                kept = both if last is None else both[:, :, max(0, both.shape[2] - last) :]
                assert torch.equal(k, kept[0]) and torch.equal(v, kept[1])
        if commit:
            context.commit(new)
            held = torch.cat([held, written[:, :, :new]], 2)
        assert (context.start, context.end) == (5, 5 + held.shape[2])
    assert context.capacity < 2 * max(INITIAL_ROWS, held.shape[2] + 320)
