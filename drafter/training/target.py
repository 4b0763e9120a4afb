"""The target while a drafter is trained: its own transformers layers under our attention. Knows nothing of drafting.

Layers are called one by one with an `Attend` in place of the attention mask, which every transformers layer hands through to its
attention function. So one registered function serves prefill, decoding over a static cache and packed documents.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

ATTENTION = "ddtree_training"


class Attend(Protocol):
    """Attention of one layer: q `[B, H, T, D]`, k and v `[B, KV, T, D]`, rotated → `[B, H, T, D]`."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor: ...


class Target:
    """A causal language model (Llama, Qwen2, Qwen3 and alike) in evaluation mode, frozen.

    `head` `[V, d]` and `embedding` `[V, d]` are its own tensors (often one), `final_norm` is `[d]`.
    """

    def __init__(self, target_dir: Path, device: torch.device, dtype: torch.dtype) -> None:
        from transformers import AttentionInterface, AutoModelForCausalLM

        AttentionInterface.register(ATTENTION, _attention)
        model: Any = AutoModelForCausalLM.from_pretrained(str(target_dir), dtype=dtype, attn_implementation=ATTENTION)
        self.model = model.to(device).eval().requires_grad_(False)
        self.config, self.device, self.dtype = model.config, device, dtype
        _check(self.config)
        body = model.get_decoder() if hasattr(model, "get_decoder") else model.model
        self.layers, self.norm, self.rotary = body.layers, body.norm, body.rotary_emb
        self.embedding: Tensor = model.get_input_embeddings().weight
        self.head: Tensor = model.get_output_embeddings().weight
        self.final_norm: Tensor = self.norm.weight
        self.layer: Callable[..., Tensor] = _layer
        if device.type == "cuda":
            self.packed_layer: Callable[..., Tensor] = torch.compile(_layer, dynamic=False)
        else:
            self.packed_layer = _layer

    @property
    def kv_heads(self) -> int:
        return int(getattr(self.config, "num_key_value_heads", None) or self.config.num_attention_heads)

    @property
    def head_dim(self) -> int:
        return int(getattr(self.config, "head_dim", None) or self.config.hidden_size // self.config.num_attention_heads)

    def hidden(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """ids, positions `[B, T]` int64 → normed last hidden state `[B, T, d]`, ready for `head`."""
        x = F.embedding(ids, self.embedding)
        rotary = self.rotary(x, positions)
        for layer in self.layers:
            x = self.layer(layer, x, rotary, attend)
        return self.norm(x)

    @torch.no_grad()
    def observe(
        self, ids: Tensor, positions: Tensor, layer_ids: tuple[int, ...], mask: BlockMask | Tensor
    ) -> tuple[Tensor, Tensor]:
        """Features `[B, T, n·d]` (outputs of the 0-based `layer_ids`, in that order) and the normed last hidden state.

        `mask`: a BlockMask, or dense bool `[B, 1, T, T]`.
        """
        x = F.embedding(ids, self.embedding)
        rotary = self.rotary(x, positions)
        step = self.packed_layer if isinstance(mask, BlockMask) else self.layer
        seen: dict[int, Tensor] = {}
        for i, layer in enumerate(self.layers):
            x = step(layer, x, rotary, mask)
            if i in layer_ids:
                seen[i] = x
        return torch.cat([seen[i] for i in layer_ids], -1), self.norm(x)


def causal(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """`Attend` of a whole sequence."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, scale=scale)


def _layer(layer: Any, x: Tensor, rotary: tuple[Tensor, Tensor], mask: Any) -> Tensor:
    out = layer(x, attention_mask=mask, position_embeddings=rotary)
    return out[0] if isinstance(out, tuple) else out


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, scaling: float | None = None, **_: Any
) -> tuple[Tensor, None]:
    """What transformers calls; query `[B, H, T, D]` → `[B, T, H, D]`."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if isinstance(attention_mask, BlockMask):
        out = flex_attention(query, key, value, block_mask=attention_mask, enable_gqa=True, scale=scale)
    elif isinstance(attention_mask, Tensor):
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, enable_gqa=True, scale=scale)
    else:
        out = attention_mask(module.layer_idx, query, key, value, scale)
    return out.transpose(1, 2).contiguous(), None


def _check(config: Any) -> None:
    """Refuses what the decoding and packing here would silently compute wrongly."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise ValueError(
            f"the target has layers of type {', '.join(sorted(kinds))}: only full_attention can be trained for"
        )
    for key, plain in (("final_logit_softcapping", None), ("logits_scaling", 1.0), ("logit_scale", 1.0)):
        value = getattr(config, key, None)
        if value is not None and value != plain:
            raise ValueError(f"the target scales its logits ({key} = {value}): such targets are not supported")
