"""The head that makes a drafter's log-probs depend on the path: a low-rank term of the token before each slot. Knows no layers.

logits of slot k += w2 · (gate ⊙ w1[token before it]), a Markov head as DSpark has one (speculators 0.9.0). So a candidate has a
log-prob for each candidate of the slot before it, and what a candidate's siblings share is known: a tree grown from that accepts
more of the same budget.

It lies in a checkpoint's folder `path_head`, as engines read every *.safetensors at the top level and refuse names that they do
not know. Tensors, in any floating dtype or as int8 rows (int8_rows.py), with or without "markov_head." before them:
    markov_w1.weight, markov_w2.weight   [V, r], of the token before and of the token itself
    gate.weight                          [r, d]: the gate is W h, h being the slot's normed hidden state
    gate_proj.weight, gate_proj.bias     [r, d + r], [r]: it is sigmoid(W [h, w1] + b) ("gated" in speculators)
    mlp.up.weight, mlp.up.bias, mlp.down.weight   [m, d + r], [m], [r, m]: in place of gate ⊙ w1 stands D silu(U [h, w1] + b)
and with the first two alone the gate is 1 ("vanilla" there).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor
from torch.nn import functional as F

from ddtree.drafter.config import PATH_HEAD, DrafterInfo
from ddtree.drafter.int8_rows import dequantise, quantise
from ddtree.drafter.items import Candidates
from ddtree.drafter.tensors import read_tensors

PREFIX = "markov_head."
BEFORE, ITSELF = "markov_w1.weight", "markov_w2.weight"
GATE, GATE_PROJ, GATE_BIAS = "gate.weight", "gate_proj.weight", "gate_proj.bias"
MLP_UP, MLP_BIAS, MLP_DOWN = "mlp.up.weight", "mlp.up.bias", "mlp.down.weight"


class PathHead:
    """The head of one drafter. Tables stay in the dtype given, sums are float32."""

    def __init__(self, tensors: Mapping[str, Tensor], *, vocab_size: int, hidden_size: int) -> None:
        """Raises ValueError where tensors are missing, unknown or misshapen."""
        tensors = {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}
        rank = tensors[BEFORE].shape[-1] if BEFORE in tensors else 0
        gates: dict[str, tuple[int, ...]] = {}
        self.kind = "vanilla"  # one of PATH_KINDS
        if GATE in tensors:
            self.kind, gates = "bilinear", {GATE: (rank, hidden_size)}
        elif MLP_DOWN in tensors:
            inner = tensors[MLP_DOWN].shape[-1]
            self.kind, gates = "mlp", {MLP_UP: (inner, hidden_size + rank), MLP_BIAS: (inner,), MLP_DOWN: (rank, inner)}
        elif GATE_PROJ in tensors:
            self.kind, gates = "gated", {GATE_PROJ: (rank, hidden_size + rank), GATE_BIAS: (rank,)}
        expected = {BEFORE: (vocab_size, rank), ITSELF: (vocab_size, rank), **gates}
        found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        if found != expected:
            raise ValueError(f"a path head of tensors {found}; expected {expected}")
        self.tensors = tensors
        self.rank = rank

    @classmethod
    def load(cls, info: DrafterInfo, *, dtype: torch.dtype, device: torch.device | str) -> PathHead | None:
        """That of a checkpoint; None where it has none. Raises ValueError, naming the checkpoint, where it is no such head."""
        if not info.path_head:
            return None
        sizes = {"vocab_size": info.vocab_size, "hidden_size": info.hidden_size}
        try:
            stored = dequantise(read_tensors(info.checkpoint_dir / PATH_HEAD))
            return cls({name: tensor.to(device, dtype) for name, tensor in stored.items()}, **sizes)
        except ValueError as error:
            raise ValueError(f"drafter {info.checkpoint_dir}: {error}") from error

    def save(self, checkpoint_dir: str | Path, *, dtype: torch.dtype = torch.bfloat16) -> None:
        """Writes the folder into a checkpoint. `dtype`: of the tensors; int8: as int8 rows."""
        folder = Path(checkpoint_dir) / PATH_HEAD
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: tensor.detach().cpu() for name, tensor in self.tensors.items()}
        stored = quantise(tensors) if dtype == torch.int8 else {k: t.to(dtype).contiguous() for k, t in tensors.items()}
        (folder / "model.safetensors").write_bytes(save(stored, {"format": "pt"}))

    def given_the_path(self, candidates: Candidates, hidden: Tensor, bonus: Tensor) -> Candidates:
        """The candidates with what each one's log-prob is after each candidate before it.

        A row's candidates keep the mass that they have together without the head: what it says of all other tokens is not known.

        Args:
            candidates: [B, L, K], whose first depth is overwritten.
            hidden: [B, L, d] normed hidden states of their slots.
            bonus: [B] integer tokens before the first slot.
        """
        logprobs, ids = candidates.logprobs, candidates.ids.clamp(min=0)
        mass = logprobs.logsumexp(-1, keepdim=True)
        itself = F.embedding(ids, self.tensors[ITSELF]).float().mT  # [B, L, r, K]
        first = self.gated(hidden[:, :1], bonus[:, None, None]) @ itself[:, :1]
        below = self.gated(hidden[:, 1:], ids[:, :-1]) @ itself[:, 1:]
        conditional = _with_mass(below.add_(logprobs[:, 1:, None]), mass[:, 1:, None])
        logprobs[:, :1] = _with_mass(first[:, :, 0].add_(logprobs[:, :1]), mass[:, :1])
        return Candidates(logprobs, candidates.ids, conditional)

    def gated(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """What the rows of tokens are multiplied with: hidden [B, L, d], tokens before them [B, L, K] → [B, L, K, r] float32."""
        before = F.embedding(tokens, self.tensors[BEFORE])
        if self.kind == "bilinear":
            return F.linear(hidden, self.tensors[GATE]).float()[:, :, None] * before.float()
        if self.kind == "gated":
            return torch.sigmoid(self._mixed(hidden, before, GATE_PROJ, GATE_BIAS)).float() * before.float()
        if self.kind == "mlp":
            return F.linear(F.silu(self._mixed(hidden, before, MLP_UP, MLP_BIAS)), self.tensors[MLP_DOWN]).float()
        return before.float()

    def _mixed(self, hidden: Tensor, before: Tensor, weight: str, bias: str) -> Tensor:
        """W [h, w1] + b; what is of h once for all tokens of a slot."""
        of_hidden, of_before = self.tensors[weight].split([hidden.shape[-1], self.rank], 1)
        return F.linear(hidden, of_hidden, self.tensors[bias])[:, :, None] + F.linear(before, of_before)


def _with_mass(raw: Tensor, mass: Tensor) -> Tensor:
    """Log-probs ≤ 0 of rows of logits, each row's total being `mass`, which has one column."""
    return (raw - raw.logsumexp(-1, keepdim=True)).add_(mass).clamp_(max=0)
