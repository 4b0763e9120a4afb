"""The DFlash block-diffusion drafter (arXiv 2602.06036) as a torch module under its published tensor names.

Qwen3-style layers whose queries come from the block and whose keys and values come from [context ; block]. Context is
the fused target features; embedding and lm_head are the target's and live elsewhere. Attention is not causal, except
where a layer's `Span` says so. Knows no caches, no batching and no files.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from ddtree.drafter.config import DrafterConfig, Span
from ddtree.drafter.rotary import rotary_table, rotate

Mask = BlockMask | Tensor | None


class RMSNorm(nn.Module):
    """Root-mean-square norm in fp32, scaled in the input's dtype."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return normed.to(x.dtype) * self.weight.to(x.dtype)


class Attention(nn.Module):
    """Projections and per-head norms of one layer; who attends to what is the caller's."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        bias, d, head = config.attention_bias, config.hidden_size, config.head_dim
        self.head_dim = head
        self.q_proj = nn.Linear(d, config.num_heads * head, bias=bias)
        self.k_proj = nn.Linear(d, config.num_kv_heads * head, bias=bias)
        self.v_proj = nn.Linear(d, config.num_kv_heads * head, bias=bias)
        self.o_proj = nn.Linear(config.num_heads * head, d, bias=bias)
        self.q_norm = RMSNorm(head, config.rms_norm_eps)
        self.k_norm = RMSNorm(head, config.rms_norm_eps)

    def query(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x `[..., d]` → rotated queries `[..., heads, head_dim]`."""
        return rotate(self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim))), cos, sin)

    def key_value(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """x `[..., d]` → rotated keys and values, each `[..., kv_heads, head_dim]`."""
        k = rotate(self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.head_dim))), cos, sin)
        return k, self.v_proj(x).unflatten(-1, (-1, self.head_dim))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DFlashLayer(nn.Module):
    """One layer. At run time `stack.py` runs its weights in another arrangement."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, context: Tensor, cos: Tensor, sin: Tensor, mask: Mask) -> Tensor:
        """x `[B, Q, d]`, context `[B, T, d]`, cos and sin `[B, T+Q, 1, head_dim]` (context first) → `[B, Q, d]`."""
        t, attention = context.shape[1], self.self_attn
        h = self.input_layernorm(x)  # the block's only: context is already normed
        q = attention.query(h, cos[:, t:], sin[:, t:])
        context_k, context_v = attention.key_value(context, cos[:, :t], sin[:, :t])
        k, v = attention.key_value(h, cos[:, t:], sin[:, t:])
        k, v = torch.cat([context_k, k], 1), torch.cat([context_v, v], 1)
        x = x + attention.o_proj(_attend(q, k, v, mask).flatten(-2))
        return x + self.mlp(self.post_attention_layernorm(x))


class DFlashModel(nn.Module):
    """The drafter without embedding and lm_head. `state_dict()` has exactly the published names."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(DFlashLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def fuse(self, features: Tensor) -> Tensor:
        """Target features `[..., n·d]`, in the order of `target_layer_ids`, → context `[..., d]`."""
        return self.hidden_norm(self.fc(features))

    def forward(
        self, block: Tensor, block_positions: Tensor, context: Tensor, context_positions: Tensor, mask: Mask = None
    ) -> Tensor:
        """One uncached pass; differentiable.

        Args:
            block: `[B, Q, d]` embeddings of [bonus, MASK, …]; several blocks may be packed under a mask.
            block_positions: `[B, Q]` integer, absolute.
            context: `[B, T, d]` from `fuse`; T may be 0.
            context_positions: `[B, T]` integer, absolute.
            mask: who sees which key of [context ; block]: a flex-attention BlockMask, a dense bool
                `[B or 1, 1, Q, T+Q]` (True: seen), or None (all). A layer's own span narrows it further.
        Returns:
            `[B, Q, d]` after the final norm, for the target's lm_head.
        Raises:
            ValueError: a BlockMask with layers that slide or are causal; give a dense mask.
        """
        positions = torch.cat([context_positions, block_positions], 1)
        cos, sin = rotary_table(positions, self.config.rope, self.config.head_dim, block.dtype)
        context = context.to(block.dtype)
        x = block
        for layer, span in zip(self.layers, self.config.spans, strict=True):
            x = layer(x, context, cos, sin, _narrow(mask, span, block_positions, positions))
        return self.norm(x)


def visible(span: Span, query_positions: Tensor, key_positions: Tensor) -> Tensor:
    """Bool `[..., Q, K]`: what `span` lets queries at `[..., Q]` see of keys at `[..., K]`."""
    ahead = key_positions[..., None, :] - query_positions[..., :, None]
    seen = ahead <= 0 if span.causal else torch.ones_like(ahead, dtype=torch.bool)
    if span.window is not None:
        seen = seen & (ahead.abs() < span.window)
    return seen


def _narrow(mask: Mask, span: Span, query_positions: Tensor, key_positions: Tensor) -> Mask:
    if span.everything:
        return mask
    if isinstance(mask, BlockMask):
        raise ValueError("a BlockMask cannot be narrowed to a sliding or causal layer: give a dense bool mask")
    own = visible(span, query_positions, key_positions)[:, None]
    return own if mask is None else own & mask


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    """q `[B, Q, heads, D]`, k and v `[B, K, kv_heads, D]` → `[B, Q, heads, D]`."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if isinstance(mask, BlockMask):
        out = flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
    else:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return out.transpose(1, 2)
