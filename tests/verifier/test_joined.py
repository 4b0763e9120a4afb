"""Joined linear layers give what the separate ones give, and are what a compiled layer multiplies with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen2Config

from ddtree.kernels import packed_linear
from ddtree.verifier.joined import join_linears

from .conftest import SIZES, TINY, harness
from .test_hf import PROMPT, prompted

WITH_BIASES = {"qwen2": lambda: Qwen2Config(**SIZES), "llama": lambda: biased(TINY["llama"]())}


def biased(config: PretrainedConfig) -> PretrainedConfig:
    config.attention_bias = config.mlp_bias = True
    return config


@pytest.mark.parametrize("make", [*TINY.values(), *WITH_BIASES.values()], ids=[*TINY, "qwen2", "llama-biased"])
@torch.inference_mode()
def test_joined_layers_give_what_separate_ones_give(make: Callable[[], PretrainedConfig]) -> None:
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(make()).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.normal_(0, 0.3)  # zero at first
    tokens = torch.tensor([PROMPT])
    separate, weights = model(tokens).logits, sum(parameter.numel() for parameter in model.parameters())
    join_linears(model.get_decoder().layers)
    torch.testing.assert_close(model(tokens).logits, separate, atol=1e-5, rtol=1e-5)
    assert sum(parameter.numel() for parameter in model.parameters()) == weights
    assert not any(parameter.requires_grad for name, parameter in model.named_parameters() if "layernorm.1" in name)


@pytest.fixture
def unpacked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Linear layers as a GPU has them, and a compiler that remembers nothing of other tests."""
    monkeypatch.setattr(packed_linear, "can_pack", lambda device, dtype: False)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.usefixtures("unpacked")
def test_compiled_layers_equal_causal_forwards(tiny_dir: Callable[[str], Path], kind: str) -> None:
    """And one layer's code serves all, with four multiplications: q with k and v, o, gate with up, down.

    The graphs run as they are: what a compiler of C++ or for a GPU makes of them would take a minute.
    """
    h, counter = harness(tiny_dir(kind), feature_layers=(0, 2), pages=32), CompileCounterWithBackend("aot_eager")
    for layer in h.target._decoder.layers:
        layer.compile(backend=counter)
    sequence = prompted(h, PROMPT).sequence
    tree = h.random_tree(sequence, root=50, budget=len(PROMPT) - 1, generator=torch.Generator().manual_seed(0))
    [output] = h.step(tree)
    h.check_rows(tree, PROMPT, output, atol=5e-5)
    calls = [node.target for graph in counter.graphs for node in graph.graph.nodes if node.op == "call_function"]
    assert sum(call is torch.nn.functional.linear for call in calls) == 4
