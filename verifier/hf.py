"""The transformers backend: the model's own code on one device, attending over the paged pool through `verify_attn`.

Knows one step at a time: which sequences there are, and which slots are theirs, is the caller's business.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.utils import logging

from ddtree.kernels import Rows, verify_attn
from ddtree.kernels.packed_linear import pack_linears
from ddtree.verifier.batch import VerifyBatch, VerifyResult
from ddtree.verifier.dtype import resolve_dtype
from ddtree.verifier.model_dir import TargetInfo
from ddtree.verifier.noise import KeyedNoise
from ddtree.verifier.pool import KVPool
from ddtree.verifier.sampling import sample


@dataclass(frozen=True)
class _Step:
    """What the attention function and the feature hooks need of a step; travels in the forward's keyword arguments."""

    pool: KVPool
    slots: Tensor
    rows: Rows
    features: dict[int, Tensor] = field(default_factory=dict)  # layer → its output [T, d]


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, *, scaling: float, ddtree: _Step, **_: Any
) -> tuple[Tensor, None]:
    """transformers' attention interface: q [1, Hq, T, D], k and v [1, Hkv, T, D] → [1, T, Hq, D].

    transformers builds no mask for an attention name it does not know, so no [T, T] tensor exists anywhere.
    """
    layer: int = module.layer_idx  # type: ignore[assignment]
    pool = ddtree.pool
    pool.write(layer, ddtree.slots, key[0].transpose(0, 1), value[0].transpose(0, 1))
    out, _lse = verify_attn(query[0].transpose(0, 1), pool.k[layer], pool.v[layer], ddtree.rows, scale=scaling)
    return out.unsqueeze(0), None


AttentionInterface.register("ddtree", _attend)


class HFTarget:
    """A target run by transformers.

    Args:
        model_dir: a Hugging Face directory of a type that this backend serves (see `backends`).
        dtype: of weights and KV; a torch name or "auto" (see `choose_dtype`).
        device: "cpu" or a CUDA device.
        page_size, pages: shape of the KV pool.
        feature_layers: 0-based layers whose outputs make the features. Layer i gives what transformers calls
            `hidden_states[i + 1]`; for the last layer that is, as in transformers, the output of the final norm.
        threads: CPU threads of this process; None leaves torch's setting.
    """

    def __init__(
        self,
        model_dir: str | Path,
        *,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "cpu",
        page_size: int,
        pages: int,
        feature_layers: Sequence[int] = (),
        threads: int | None = None,
    ) -> None:
        self.info = TargetInfo.read(Path(model_dir))
        self.info.check_layers(feature_layers)
        if threads is not None:
            torch.set_num_threads(threads)
        self.device = torch.device(device)
        self.dtype = resolve_dtype(dtype, self.device)
        self._model = _load(Path(model_dir), self.dtype, self.device)
        self._decoder = self._model.get_decoder()
        self._lm_head = self._model.get_output_embeddings()
        self.feature_layers = tuple(feature_layers)
        self.feature_size = len(self.feature_layers) * self.info.hidden_size
        for i in set(self.feature_layers) - {self.info.num_layers - 1}:
            self._decoder.layers[i].register_forward_hook(_keep_output, with_kwargs=True)
        self.pool = KVPool(
            layers=self.info.num_layers,
            kv_heads=self.info.num_kv_heads,
            head_dim=self.info.head_dim,
            pages=pages,
            page_size=page_size,
            dtype=self.dtype,
            device=self.device,
        )
        self._noise = KeyedNoise(self.info.vocab_size, self.device)

    @torch.inference_mode()
    def step(self, batch: VerifyBatch) -> VerifyResult:
        """Commit, forward, draw; see `Target.step`. Raises ValueError where a batch contradicts itself or the pool."""
        batch.check(self.pool.page_size)
        started = time.perf_counter()
        if batch.commit is not None:
            self.pool.commit(batch.commit)
        committed = time.perf_counter()
        step = _Step(self.pool, batch.slots, batch.rows)
        hidden = self._decoder(
            input_ids=batch.tokens.unsqueeze(0),
            position_ids=batch.positions.unsqueeze(0),
            use_cache=False,
            ddtree=step,
        ).last_hidden_state[0]
        step.features[self.info.num_layers - 1] = hidden
        kept = [step.features[i] for i in self.feature_layers]
        features = torch.cat(kept, dim=-1) if kept else hidden[:, :0]
        wanted = batch.sampling.row.long()
        logits = self._lm_head(hidden[wanted])
        y = sample(logits, batch.positions[wanted] + 1, batch.sampling, self._noise)
        verified = time.perf_counter()
        return VerifyResult(y, features, {"commit": committed - started, "verify": verified - committed})


def _load(model_dir: Path, dtype: torch.dtype, device: torch.device) -> Any:
    """The model as transformers makes it, without its progress bar; on a CPU with the linear layers packed."""
    noisy = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype, attn_implementation="ddtree")
    finally:
        if noisy:
            logging.enable_progress_bar()
    model = model.to(device).eval().requires_grad_(False)
    pack_linears(model)
    return model


def _keep_output(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
    """Forward hook of a decoder layer: keep its output for the features of this step."""
    kwargs["ddtree"].features[module.self_attn.layer_idx] = output[0]  # type: ignore[union-attr]
