"""The model against the authors' module (PyPI dflash 0.1.0) and against itself under masks."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from ddtree.drafter.config import DrafterConfig, Rope, Span
from ddtree.drafter.dflash import DFlashModel
from ddtree.drafter.rotary import rotary_table

VARIANTS: dict[str, dict[str, Any]] = {
    "full": {},
    "one layer, all heads": {"num_layers": 1, "num_kv_heads": 6, "spans": (Span(),)},
    "sliding": {"spans": (Span(causal=True, window=7), Span())},
    "sliding both ways": {"spans": (Span(window=7), Span())},
    "causal, window longer than all": {"spans": (Span(causal=True, window=500), Span(causal=True, window=500))},
    "yarn": {"rope": Rope(1e4, "yarn", 8.0, 16)},
    "yarn as Kimi": {"rope": Rope(5e4, "yarn", 64.0, 16, 1.0, 1.0, 1.0, 1.0)},
    "yarn with mscale": {"rope": Rope(1e4, "yarn", 4.0, 64, mscale=1.5, mscale_all_dim=0.5)},
    "bias": {"attention_bias": True},
}


@pytest.fixture(scope="module")
def authors() -> ModuleType:
    """Their model file alone: the package's other parts need a data set library."""
    package = importlib.util.find_spec("dflash")
    if package is None or not package.submodule_search_locations:
        pytest.skip("the authors' package is not installed: pip install --no-deps dflash==0.1.0")
    path = f"{package.submodule_search_locations[0]}/model.py"
    spec = importlib.util.spec_from_file_location("dflash_authors_model", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("context_rows", [1, 33])
def test_equals_the_authors_module(
    authors: ModuleType,
    config: DrafterConfig,
    random_model: Callable[..., DFlashModel],
    variant: str,
    context_rows: int,
) -> None:
    config = dataclasses.replace(config, **VARIANTS[variant])
    ours = random_model(config)
    theirs = authors.DFlashDraftModel(authors.Qwen3Config(**config.to_dict())).eval()
    theirs.load_state_dict(ours.state_dict(), strict=True)
    block = torch.randn(2, config.block_size, config.hidden_size)
    features = torch.randn(2, context_rows, len(config.target_layer_ids) * config.hidden_size)
    positions = torch.arange(context_rows + config.block_size).expand(2, -1)
    with torch.no_grad():
        expected = theirs(position_ids=positions, noise_embedding=block, target_hidden=features)
        context = ours.fuse(features)
        actual = ours(block, positions[:, context_rows:], context, positions[:, :context_rows])
    assert expected.abs().mean() > 0.1
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


def test_state_dict_has_the_published_names(config: DrafterConfig) -> None:
    layer = {"input_layernorm", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}
    layer |= {f"self_attn.{part}" for part in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")}
    expected = {"fc.weight", "hidden_norm.weight", "norm.weight"}
    expected |= {f"layers.{i}.{name}.weight" for i in range(2) for name in layer}
    assert set(DFlashModel(config).state_dict()) == expected


def test_slot_0_decides_the_draft(config: DrafterConfig, random_model: Callable[..., DFlashModel]) -> None:
    """Every slot sees slot 0, so the bonus token must be there (with MASK there acceptance collapses)."""
    model = random_model(config)
    block = torch.randn(1, config.block_size, 32).repeat(2, 1, 1)
    block[1, 0] = block[1, 1]
    context, at = model.fuse(torch.randn(1, 9, 96)).expand(2, -1, -1), torch.arange(14).expand(2, -1)
    hidden = model(block, at[:, 9:], context, at[:, :9])
    assert ((hidden[0] - hidden[1]).abs().amax(-1) > 1e-3).all()


def test_the_order_of_features_matters(config: DrafterConfig, random_model: Callable[..., DFlashModel]) -> None:
    model, features = random_model(config), torch.randn(4, 3, 32)
    assert (model.fuse(features.flatten(1)) - model.fuse(features[:, [1, 0, 2]].flatten(1))).abs().max() > 0.1


def packed_mask(starts: list[int], anchors: list[int], context: int, slots: int) -> Any:
    """Block a sees context rows starts[a] … anchors[a] - 1 and itself."""
    start, anchor = torch.tensor(starts), torch.tensor(anchors)

    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        own = q // slots
        before = (kv < context) & (kv >= start[own]) & (kv < anchor[own])
        return before | ((kv >= context) & ((kv - context) // slots == own))

    return mask


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("variant", ["full", "sliding", "sliding both ways"])
@pytest.mark.parametrize("kind", ["dense", "flex"])
def test_packed_blocks_equal_lone_ones(
    config: DrafterConfig, random_model: Callable[..., DFlashModel], variant: str, kind: str
) -> None:
    """The training form: many blocks of two documents in one row, positions counted per document."""
    model, slots = random_model(dataclasses.replace(config, **VARIANTS[variant])), config.block_size
    starts, anchors, document = [0, 0, 12], [5, 11, 20], [0, 0, 12]
    context = model.fuse(torch.randn(1, 22, 96))
    blocks = torch.randn(3, slots, 32)
    context_positions = torch.cat([torch.arange(12), torch.arange(10)])[None]
    block_positions = torch.stack([torch.arange(slots) + a - d for a, d in zip(anchors, document, strict=True)])
    rule = packed_mask(starts, anchors, 22, slots)
    q, kv = torch.arange(3 * slots)[:, None], torch.arange(22 + 3 * slots)[None]
    mask: Any = rule(0, 0, q, kv)[None, None]
    if kind == "flex":
        mask = create_block_mask(rule, 1, None, 3 * slots, 22 + 3 * slots, device="cpu")
        if variant != "full":
            with pytest.raises(ValueError, match="give a dense bool mask"):
                model(blocks.flatten(0, 1)[None], block_positions.flatten()[None], context, context_positions, mask)
            return
    with torch.no_grad():
        packed = model(blocks.flatten(0, 1)[None], block_positions.flatten()[None], context, context_positions, mask)
        for i, (s, a) in enumerate(zip(starts, anchors, strict=True)):
            lone = model(blocks[i : i + 1], block_positions[i : i + 1], context[:, s:a], context_positions[:, s:a])
            torch.testing.assert_close(packed[0, i * slots : (i + 1) * slots], lone[0], atol=1e-5, rtol=1e-4)


def test_every_parameter_gets_a_gradient(config: DrafterConfig) -> None:
    model = DFlashModel(config)
    at = torch.arange(9)[None]
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model(torch.randn(1, 5, 32), at[:, 4:], model.fuse(torch.randn(1, 4, 96)), at[:, :4])
    hidden.float().square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert sum(bool(p.grad.abs().sum() > 0) for p in model.parameters() if p.grad is not None) == len(
        list(model.parameters())
    )


def test_rotary_tells_far_positions_apart_in_bf16() -> None:
    cos, _ = rotary_table(torch.tensor([100_000, 100_001]), Rope(1e4), 8, torch.bfloat16)
    exact, _ = rotary_table(torch.tensor([100_000, 100_001]), Rope(1e4), 8, torch.float32)
    assert (cos[0] != cos[1]).any() and (cos.float() - exact).abs().max() < 0.01


@pytest.mark.parametrize("variant", ["full", "sliding", "yarn"])
def test_only_distances_matter(variant: str, config: DrafterConfig, random_model: Callable[..., DFlashModel]) -> None:
    """So training at shifted positions would teach nothing, and a long context differs by its length alone."""
    config = dataclasses.replace(config, **VARIANTS[variant])
    model = random_model(config)
    block, context = torch.randn(2, 4, config.hidden_size), torch.randn(2, 9, config.hidden_size)
    at = torch.arange(13).expand(2, -1)
    near, far = (model(block, p[:, 9:], context, p[:, :9]) for p in (at, at + torch.tensor([[7000], [123]])))
    torch.testing.assert_close(far, near, atol=2e-3, rtol=2e-3)
