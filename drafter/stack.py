"""The model as it runs: features to keys and values, blocks to candidates. Knows neither sequences nor where keys lie.

Matrices that read the same input are joined, and the keys and values of new context are made for all layers at once:
fewer and larger operations, for which the K and V matrices are held twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ddtree.drafter.config import DrafterConfig
from ddtree.drafter.dflash import DFlashLayer, DFlashModel
from ddtree.drafter.items import Candidates
from ddtree.drafter.path_head import PathHead
from ddtree.drafter.rotary import rotary_table, rotate
from ddtree.drafter.target_ends import TargetEnds
from ddtree.kernels import topk_logprobs
from ddtree.kernels.clock import DeviceClock
from ddtree.kernels.packed_linear import pack


class Cache(Protocol):
    """Keys and values of the sequences of one call. Which rows belong to which sequence, only it knows."""

    def feed(self, kv: Tensor) -> None:
        """Takes the new context rows `[n, layers, 2 * kv_heads, head_dim]`, keys before values."""

    def attend(self, layer: int, q: Tensor, kv: Tensor) -> Tensor:
        """Attention of B blocks, each over its context and itself.

        q `[B * slots, heads, head_dim]`, kv `[B * slots, 2 * kv_heads, head_dim]` → like q.
        """


class Stack:
    """A DFlash model between a target's embedding and lm_head."""

    def __init__(self, model: DFlashModel, ends: TargetEnds, top_k: int, path_head: PathHead | None = None) -> None:
        """Takes the model apart: its layers are gone afterwards, so that weights are not held twice.

        Args:
            top_k: candidates per position (K), at most the vocabulary.
            path_head: makes candidates depend on those before them.
        """
        self._path_head = path_head
        self.config = config = model.config
        self.clock = DeviceClock(ends.embedding.device)
        self.device, self.dtype, self.top_k = ends.embedding.device, ends.embedding.dtype, top_k
        layers = [cast(DFlashLayer, layer) for layer in model.layers]
        del model.layers
        self._embedding, self._lm_head = ends.embedding, pack(_linear(ends.lm_head))
        self._fc, self._hidden_norm, self._norm = pack(model.fc), model.hidden_norm.weight, model.norm.weight
        pairs = ((layer.self_attn.k_proj, layer.self_attn.v_proj) for layer in layers)
        self._context_kv = _joined([linear for pair in pairs for linear in pair])
        self._context_norm = torch.stack([layer.self_attn.k_norm.weight for layer in layers])[:, None]
        layers.reverse()
        self._layers = [_Layer(layers.pop(), config) for _ in range(config.num_layers)]

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin for rows at integer `positions [n]`."""
        return rotary_table(positions, self.config.rope, self.config.head_dim, self.dtype)

    def feed(self, features: Tensor, cos: Tensor, sin: Tensor, cache: Cache) -> None:
        """Puts n context rows into the cache: features `[n, targets * d]` in the model's dtype."""
        config = self.config
        context = _norm(self._fc(features), self._hidden_norm, config)
        kv = self._context_kv(context).view(-1, config.num_layers, 2 * config.num_kv_heads, config.head_dim)
        k = kv[:, :, : config.num_kv_heads]
        rotate(_head_norm(kv, config)[:, :, : k.shape[2]] * self._context_norm, cos[:, None], sin[:, None], out=k)
        cache.feed(kv)

    def draft(self, ids: Tensor, cos: Tensor, sin: Tensor, cache: Cache, levels: int | None = None) -> Candidates:
        """Candidates after B blocks [bonus, MASK, …]: ids `[B * slots]` integer. `levels`: for the first so many positions only,
        which saves most of what the lm_head takes; None: for all."""
        config = self.config
        levels = config.horizon if levels is None else levels
        x = self._embedding[ids]
        if config.embedding_scale != 1.0:
            x = x * config.embedding_scale
        for i, layer in enumerate(self._layers):
            x = layer.finish(x, cache.attend(i, *layer.qkv(x, cos, sin)))
        hidden = x.unflatten(0, (-1, config.block_size))[:, 1 : 1 + levels].flatten(0, 1)
        hidden = _norm(hidden, self._norm, config)
        logprobs, best = topk_logprobs(self._logits(hidden), self.top_k)
        candidates = Candidates(*(rows.unflatten(0, (-1, levels)) for rows in (logprobs, best)))
        if self._path_head is None:
            return candidates
        bonus = ids.view(-1, config.block_size)[:, 0]
        return self._path_head.given_the_path(candidates, hidden.unflatten(0, (-1, levels)), bonus)

    def no_candidates(self) -> Candidates:
        """The candidates of no block."""
        logprobs = torch.empty(0, self.config.horizon, self.top_k, device=self.device)
        return Candidates(logprobs, logprobs.int())

    def _logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self._lm_head(hidden)
        if self.config.logit_scale != 1.0:
            logits = logits * self.config.logit_scale
        cap = self.config.logit_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap


class _Layer:
    """`DFlashLayer` in two halves, before and after attention, with fewer matrices. Rows are `[n, d]`."""

    def __init__(self, layer: DFlashLayer, config: DrafterConfig) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._config = config
        self._input_norm, self._mlp_norm = layer.input_layernorm.weight, layer.post_attention_layernorm.weight
        self._qkv = _joined([attention.q_proj, attention.k_proj, attention.v_proj])
        q_norm, k_norm = attention.q_norm.weight, attention.k_norm.weight
        self._qk_norm = torch.stack((*[q_norm] * config.num_heads, *[k_norm] * config.num_kv_heads))
        self._o = pack(attention.o_proj)
        self._gate_up = _joined([mlp.gate_proj, mlp.up_proj])
        self._down = pack(mlp.down_proj)

    def qkv(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated queries `[n, heads, head_dim]`; rotated keys, then values `[n, 2 * kv_heads, head_dim]`."""
        config, heads, both = self._config, self._config.num_heads, len(self._qk_norm)
        qkv = self._qkv(_norm(x, self._input_norm, config)).unflatten(1, (-1, config.head_dim))
        rotate(_head_norm(qkv, config)[:, :both] * self._qk_norm, cos, sin, out=qkv[:, :both])
        return qkv[:, :heads], qkv[:, heads:]

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """The residual stream x, in place, after attention `[n, heads, head_dim]` and MLP."""
        x = _add(x, self._o, attended.flatten(1))
        gate, up = self._gate_up(_norm(x, self._mlp_norm, self._config)).chunk(2, 1)
        return _add(x, self._down, F.silu(gate) * up)


def _norm(x: Tensor, weight: Tensor, config: DrafterConfig) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, config.rms_norm_eps)


def _head_norm(x: Tensor, config: DrafterConfig) -> Tensor:
    """Every head of `x [..., heads, head_dim]` normed, weights left to the caller: they differ by head."""
    return F.rms_norm(x, (config.head_dim,), eps=config.rms_norm_eps)


def _add(x: Tensor, linear: nn.Module, rows: Tensor) -> Tensor:
    """x + linear(rows), written to x."""
    if isinstance(linear, nn.Linear) and linear.bias is None:
        return x.addmm_(rows, linear.weight.T)
    return x.add_(linear(rows))


def _joined(linears: Sequence[nn.Linear]) -> nn.Module:
    """One layer with the outputs of all, side by side."""
    biases = tuple(linear.bias for linear in linears if linear.bias is not None)
    return pack(_linear(torch.cat(tuple(linear.weight for linear in linears)), torch.cat(biases) if biases else None))


def _linear(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    """A layer around `weight [out, in]`, which is not copied."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias, requires_grad=False)
    return layer
