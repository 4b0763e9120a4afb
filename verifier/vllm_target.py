"""The vLLM backend: vLLM's model and parallel layers, attending over the paged pool through `verify_attn`.

Every rank of a tensor-parallel group makes one VLLMTarget and takes the same steps. Knows one step at a time, as
`hf.HFTarget` does, and nothing of how ranks are started. Importing this module needs vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionMetadata, MLAAttentionImpl

from ddtree.kernels import Rows, verify_attn, verify_attn_mla
from ddtree.verifier import vllm_versions
from ddtree.verifier.batch import VerifyBatch, VerifyResult
from ddtree.verifier.dtype import resolve_dtype
from ddtree.verifier.graphs import StepSizes
from ddtree.verifier.memory import MemoryShare, fitting_pages
from ddtree.verifier.model_dir import TargetInfo
from ddtree.verifier.pool import KVPool, LatentPool, Pool, put_rows
from ddtree.verifier.steps import Steps


@dataclass
class _Step(AttentionMetadata):
    """What the attention implementations need of a step. vLLM hands it to each layer.

    The fields after `rows` are what MLAAttention reads: every row is a "decode", which takes the absorbed path.
    """

    rows: Rows
    num_actual_tokens: int
    num_decode_tokens: int
    num_decodes: int = 1
    num_prefills: int = 0
    prefill: None = None
    decode: bool = True


class _Variant:
    """What both forms have in common: the constructor that vLLM calls."""

    def __init__(
        self,
        num_heads: int,  # of this rank
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        kv_lora_rank: int = 0,
        **rest: Any,
    ) -> None:
        wanted: dict[str, object] = {
            "ALiBi": alibi_slopes,
            "a sliding window": sliding_window,
            "a soft cap of logits": logits_soft_cap,
            "KV shared between layers": kv_sharing_target_layer_name,
            "sinks": rest.get("sinks"),
            f"{kv_cache_dtype} KV": kv_cache_dtype != "auto" or None,
            f"{attn_type} layers": attn_type != "decoder" or None,
        }
        if extra := [what for what, value in wanted.items() if value is not None]:
            raise ValueError(f"the model's attention has {' and '.join(extra)}, which the verifier does not support")
        self.num_heads, self.head_size, self.scale, self.num_kv_heads = num_heads, head_size, scale, num_kv_heads
        self.kv_cache_dtype, self.kv_lora_rank = kv_cache_dtype, kv_lora_rank
        self.dcp_world_size, self.supports_quant_query_input, self.q_pad_num_heads = 1, False, None


class _Attention(_Variant, AttentionImpl):
    """Keys and values per head. `kv_cache` [2, pages, page, Hkv, D] is a layer's part of the pool."""

    def do_kv_cache_update(self, layer: Any, k: Tensor, v: Tensor, kv_cache: Tensor, slots: Tensor) -> None:
        put_rows(kv_cache[0], slots, k)
        put_rows(kv_cache[1], slots, v)

    def forward(
        self,
        layer: Any,
        query: Tensor,  # [T, Hq, D]
        key: Tensor,  # in the cache already
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: _Step,
        output: Tensor,  # [T, Hq, D]
        output_scale: None = None,
        output_block_scale: None = None,
    ) -> Tensor:
        out, _lse = verify_attn(query, kv_cache[0], kv_cache[1], attn_metadata.rows, scale=self.scale)
        return output.copy_(out)


class _LatentAttention(_Variant, MLAAttentionImpl):
    """Latent attention, absorbed: vLLM multiplies by W_UK before and by W_UV after. `kv_cache` [1, pages, page, Dl+Dr]."""

    def do_kv_cache_update(
        self, latent: Tensor, rotary: Tensor, kv_cache: Tensor, slots: Tensor, kv_cache_dtype: str, k_scale: Tensor
    ) -> None:
        put_rows(kv_cache[0], slots, torch.cat((latent, rotary.flatten(1)), -1))

    def forward_mqa(
        self, q: Tensor | tuple[Tensor, Tensor], kv_cache: Tensor, attn_metadata: _Step, layer: Any
    ) -> tuple[Tensor, None]:
        """q [T, H, Dl+Dr], or its two parts → [T, H, Dl]."""
        query = q if isinstance(q, Tensor) else torch.cat(q, -1)
        out, _lse = verify_attn_mla(query, kv_cache[0], attn_metadata.rows, scale=self.scale, v_dim=self.kv_lora_rank)
        return out, None


class _Backend(AttentionBackend):
    accept_output_buffer = True
    forward_includes_kv_cache_update = False
    supported_dtypes = [torch.float16, torch.bfloat16, torch.float32]  # noqa: RUF012

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[_Attention]:
        return _Attention

    @staticmethod
    def get_builder_cls() -> type:
        raise NotImplementedError("only vLLM's model runner builds metadata")


class _LatentBackend(_Backend):
    @classmethod
    def is_mla(cls) -> bool:
        return True

    @staticmethod
    def get_impl_cls() -> type[_LatentAttention]:
        return _LatentAttention


class VLLMTarget:
    """This rank's part of a target that vLLM runs.

    Args:
        model_dir, dtype, device, page_size, pages, feature_layers, threads, graphs: as for `hf.HFTarget`, whose
            `batch_invariant` is not to be had here. `device` is this rank's own; `pages` are of this rank's pool, and equal
            on all ranks.
        rank, world_size: this process's place in the tensor-parallel group.
        init_address: where the ranks of a group meet, "tcp://HOST:PORT" with a port that is free on rank 0's host.
            A group of one needs none.
    """

    def __init__(
        self,
        model_dir: str | Path,
        *,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "cpu",
        page_size: int,
        pages: int | MemoryShare,
        feature_layers: Sequence[int] = (),
        threads: int | None = None,
        batch_invariant: bool = False,
        graphs: StepSizes | None = None,
        rank: int = 0,
        world_size: int = 1,
        init_address: str | None = None,
    ) -> None:
        if batch_invariant:
            raise ValueError("backend 'vllm' has no batch_invariant steps; use backend 'hf' on a cpu")
        if not 0 <= rank < world_size or (world_size > 1 and init_address is None):
            raise ValueError(f"rank {rank} of {world_size} at {init_address}; a group needs an address, ranks from 0")
        self.info = TargetInfo.read(Path(model_dir))
        self.info.check_layers(feature_layers)
        if threads is not None:
            torch.set_num_threads(threads)
        self.device, self.dtype, self.rank = torch.device(device), resolve_dtype(dtype, device), rank
        self._last = self.info.num_layers - 1
        self.feature_layers = tuple(feature_layers)
        self.feature_size = len(self.feature_layers) * self.info.hidden_size
        self._kept = tuple(sorted(set(self.feature_layers) - {self._last}))
        self._model = vllm_versions.load(
            str(model_dir),
            attention=f"{__name__}.{'_LatentBackend' if self.info.latent_width else '_Backend'}",
            latent=bool(self.info.latent_width),
            dtype=self.dtype,
            device=self.device,
            rank=rank,
            world_size=world_size,
            init_address=init_address or "tcp://127.0.0.1:0",
        )
        self._model.keep_outputs(self._kept)
        if isinstance(pages, MemoryShare):
            own = fitting_pages(partial(self._bind_pool, page_size), self, graphs, pages)
            pages = self._model.smallest(own)
        self.pool = self._bind_pool(page_size, pages)
        self._steps = Steps(self, self.pool, self.info.vocab_size, graphs)

    def prepare(self, batch: VerifyBatch) -> None:
        """See Target.prepare."""
        self._steps.prepare(batch)

    @property
    def compute_seconds(self) -> float:
        """See Target.compute_seconds."""
        return self._steps.clock.seconds

    @torch.inference_mode()
    def step(self, batch: VerifyBatch) -> VerifyResult:
        """Commit, forward, draw; see `Target.step`. Only rank 0 draws: `y` is empty on the others.

        Raises ValueError, on all ranks alike, where a batch contradicts itself or the pool.
        """
        return self._steps.run(batch)

    def forward(self, tokens: Tensor, positions: Tensor, slots: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        """See `model.Model`."""
        step = _Step(rows, num_actual_tokens=len(tokens), num_decode_tokens=len(tokens))
        hidden, kept = self._model.forward(tokens.long(), positions.long(), slots, step)
        outputs = {**dict(zip(self._kept, kept, strict=True)), self._last: hidden}
        return hidden, torch.cat([outputs[i] for i in self.feature_layers] or [hidden[:, :0]], dim=-1)

    def logits(self, hidden: Tensor) -> Tensor | None:
        """See `model.Model`."""
        logits = self._model.logits(hidden)
        return None if self.rank else logits

    def _bind_pool(self, page_size: int, pages: int) -> Pool:
        """Make the pool of this rank's heads and give each layer its part."""
        layers = list(self._model.layers.values())
        if len(layers) != self.info.num_layers:
            raise ValueError(
                f"vLLM made {len(layers)} attention layers of {self.info.num_layers}: not a model to verify"
            )
        shape: dict[str, Any] = {"layers": len(layers), "pages": pages, "page_size": page_size}
        shape |= {"dtype": self.dtype, "device": self.device}
        pool: Pool
        if self.info.latent_width:
            pool = LatentPool(width=self.info.latent_width, **shape)
        else:
            pool = KVPool(kv_heads=layers[0].num_kv_heads, head_dim=layers[0].head_size, **shape)
        for i, layer in enumerate(layers):
            layer.kv_cache = pool.layer(i)
        return pool
