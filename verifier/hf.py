"""The transformers backend: the model's own code on one device, attending over the paged pool through `verify_attn`.

Knows one step at a time: which sequences there are, and which slots are theirs, is the caller's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from ddtree.kernels import Rows, verify_attn
from ddtree.kernels.packed_linear import pack_linears, padded_rows
from ddtree.verifier.batch import VerifyBatch, VerifyResult
from ddtree.verifier.dtype import resolve_dtype
from ddtree.verifier.graphs import StepSizes
from ddtree.verifier.joined import join_linears
from ddtree.verifier.memory import MemoryShare, fitting_pages
from ddtree.verifier.model_dir import TargetInfo, random_weights
from ddtree.verifier.pool import KVPool
from ddtree.verifier.steps import Steps


@dataclass(frozen=True)
class _Step:
    """What the attention function and the feature hooks need of a step; travels in the forward's keyword arguments."""

    pool: KVPool
    slots: Tensor  # of the first rows; the others are padding
    rows: Rows
    batch_invariant: bool
    features: dict[int, Tensor] = field(default_factory=dict)  # layer → its output [T, d]


@torch.compiler.disable
def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, *, scaling: float, ddtree: _Step, **_: Any
) -> tuple[Tensor, None]:
    """transformers' attention interface: q [1, Hq, T, D], k and v [1, Hkv, T, D] → [1, T, Hq, D].

    transformers builds no mask for an attention name it does not know, so no [T, T] tensor exists anywhere.
    """
    layer: int = module.layer_idx  # type: ignore[assignment]
    pool, count = ddtree.pool, len(ddtree.slots)
    pool.write(layer, ddtree.slots, key[0, :, :count].transpose(0, 1), value[0, :, :count].transpose(0, 1))
    out, _lse = verify_attn(
        query[0].transpose(0, 1),
        pool.k[layer],
        pool.v[layer],
        ddtree.rows,
        scale=scaling,
        batch_invariant=ddtree.batch_invariant,
    )
    return out.unsqueeze(0), None


AttentionInterface.register("ddtree", _attend)


class HFTarget:
    """A target run by transformers.

    Args:
        model_dir: a Hugging Face directory of a type that this backend serves (see `backends`).
        dtype: of weights and KV; a torch name or "auto" (see `choose_dtype`).
        device: "cpu" or a CUDA device.
        page_size, pages: shape of the KV pool; a MemoryShare makes it as large as fits (and needs `graphs`).
        feature_layers: 0-based layers whose outputs make the features. Layer i gives what transformers calls
            `hidden_states[i + 1]`; for the last layer that is, as in transformers, the output of the final norm.
        threads: CPU threads of this process; None leaves torch's setting.
        batch_invariant: on a CPU: see `verify_attn`.
        graphs: on a GPU, record steps up to this size as CUDA graphs (see `steps.Steps`); None records none.
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
        self.feature_layers, self._batch_invariant = tuple(feature_layers), batch_invariant
        self.feature_size = len(self.feature_layers) * self.info.hidden_size
        for i in set(self.feature_layers) - {self.info.num_layers - 1}:
            self._decoder.layers[i].register_forward_hook(_keep_output, with_kwargs=True)
        if isinstance(pages, MemoryShare):
            pages = fitting_pages(partial(self._bind_pool, page_size), self, graphs, pages)
        self.pool = self._bind_pool(page_size, pages)
        if graphs is not None:
            for layer in self._decoder.layers:  # all share what is compiled for one: a third of the kernels
                layer.compile(options={"combo_kernels": True})
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
        """Commit, forward, draw; see `Target.step`. Raises ValueError where a batch contradicts itself or the pool."""
        return self._steps.run(batch)

    def _bind_pool(self, page_size: int, pages: int) -> KVPool:
        self.pool = KVPool(
            layers=self.info.num_layers,
            kv_heads=self.info.num_kv_heads,
            head_dim=self.info.head_dim,
            pages=pages,
            page_size=page_size,
            dtype=self.dtype,
            device=self.device,
        )
        return self.pool

    def forward(self, tokens: Tensor, positions: Tensor, slots: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        """See `model.Model`."""
        count = len(tokens)
        if self.device.type == "cpu":
            tokens, positions, rows = _padded(tokens, positions, rows)
        step = _Step(self.pool, slots, rows, self._batch_invariant)
        hidden = self._decoder(
            input_ids=tokens.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False, ddtree=step
        ).last_hidden_state[0]
        step.features[self.info.num_layers - 1] = hidden
        kept = [step.features[i][:count] for i in self.feature_layers]
        hidden = hidden[:count]
        return hidden, torch.cat(kept, dim=-1) if kept else hidden[:, :0]

    def logits(self, hidden: Tensor) -> Tensor:
        """See `model.Model`."""
        rows = len(hidden)
        if self.device.type == "cpu":
            hidden = pad(hidden, (0, 0, 0, padded_rows(rows) - rows))
        logits: Tensor = self._lm_head(hidden)
        return logits[:rows]


def _padded(tokens: Tensor, positions: Tensor, rows: Rows) -> tuple[Tensor, Tensor, Rows]:
    """With more rows (see packed_linear.py), of a last sequence that uses none of them. They have no slots."""
    more = (0, padded_rows(len(tokens)) - len(tokens))
    if not more[1]:
        return tokens, positions, rows
    padded = Rows(
        row_offsets=torch.cat((rows.row_offsets, rows.row_offsets[-1:] + more[1])),
        q_len=pad(rows.q_len, (0, 1)),
        seq_len=pad(rows.seq_len, (0, 1)),
        page_table=pad(rows.page_table, (0, 0, 0, 1)),
        page_size=rows.page_size,
        causal=pad(rows.causal, (0, 1), value=True),
        ancestors=pad(rows.ancestors, (0, 0, *more)),
    )
    return pad(tokens, more), pad(positions, more), padded


def _load(model_dir: Path, dtype: torch.dtype, device: torch.device) -> Any:
    """The model as transformers makes it, without its progress bar; linear layers joined, and on a CPU packed."""
    noisy = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model: Any = _make(model_dir, dtype, device) if random_weights(model_dir) else _read(model_dir, dtype)
    finally:
        if noisy:
            logging.enable_progress_bar()
    join_linears(model.get_decoder().layers)
    model = model.to(device).eval().requires_grad_(False)
    pack_linears(model)
    return model


def _read(model_dir: Path, dtype: torch.dtype) -> Any:
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype, attn_implementation="ddtree")


def _make(model_dir: Path, dtype: torch.dtype, device: torch.device) -> Any:
    """Random weights, on the device at once."""
    torch.manual_seed(0)
    with device:
        config = AutoConfig.from_pretrained(model_dir)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="ddtree")
    _decide(model.get_input_embeddings().weight.data, model.get_output_embeddings().weight.data)
    return model


def _decide(embedding: Tensor, head: Tensor) -> None:
    """Have token i followed by token i + 1 by a wide margin. Random logits are near-ties, which bfloat16 breaks one way for one
    row and another way for thirty; nothing that was recorded could be replayed."""
    embedding.normal_(0, 8)  # outweighs what the layers add
    if head is not embedding:
        torch.div(embedding.roll(1, 0), 400, out=head)


@torch.compiler.disable
def _keep_output(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
    """Forward hook of a decoder layer: keep its output for the features of this step."""
    kwargs["ddtree"].features[module.self_attn.layer_idx] = output[0]  # type: ignore[union-attr]
