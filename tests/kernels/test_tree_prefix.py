"""The first nodes of a tree are the tree of a smaller budget."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree.kernels import tree_build
from ddtree.kernels.tree import prefix


@given(st.integers(1, 4), st.integers(0, 5), st.integers(1, 6), st.integers(0, 40), st.data())
@settings(max_examples=150, deadline=None)
def test_a_prefix_is_a_smaller_tree(batch: int, levels: int, k: int, most: int, data: st.DataObject) -> None:
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    logits = torch.randint(-3, 3, (batch, levels, k), generator=generator).float()  # with ties
    logprobs = logits.log_softmax(-1).sort(-1, descending=True).values
    logprobs[torch.rand(logprobs.shape, generator=generator) < 0.1] = -torch.inf
    logprobs = logprobs.sort(-1, descending=True).values
    ids = torch.arange(k, dtype=torch.int32).expand(batch, levels, k).contiguous()
    root, seq_len = torch.arange(batch, dtype=torch.int32), torch.full((batch,), 9, dtype=torch.int32)
    budgets = data.draw(st.lists(st.integers(0, most), min_size=batch, max_size=batch))
    large = tree_build(logprobs, ids, root, seq_len, torch.full((batch,), most, dtype=torch.int32), max_budget=most)
    budget = torch.tensor(budgets, dtype=torch.int32)
    small = tree_build(logprobs, ids, root, seq_len, budget, max_budget=max(budgets))
    for name, wanted in vars(small).items():
        found = vars(prefix(large, budgets))[name]
        assert torch.equal(found, wanted) if isinstance(wanted, torch.Tensor) else found == wanted, name
