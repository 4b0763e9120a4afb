"""What one verify step takes and gives: a ragged batch of tree nodes and prompt tokens. Knows no model and no request.

`T` rows over all sequences, `S` sequences, `M` rows where the target draws a token, `C` sequences to commit first.
Every tensor of a batch lives on the target's device. Rows past a sequence's `q_len` are padding, but their K/V is
written all the same: give them slots of a page that belongs to no sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ddtree.kernels import Rows


@dataclass(frozen=True)
class Commit:
    """Accepted paths of the last round, compacted in the KV pool before this step's forward. Written by the router."""

    page_table: Tensor  # [C, P] int32, as it was when the paths were verified
    seq_len: Tensor  # [C] int32, committed KV rows before the path; node i's row is at slot seq_len + i
    path: Tensor  # [C, D+1] int32 node indices, 0 first, -1 padded (AcceptedPath.path)
    n_accepted: Tensor  # [C] int32, length of the path, root included


@dataclass(frozen=True)
class SamplingRows:
    """The rows where the target draws its own token, and how: one entry per row. Written by the router."""

    row: Tensor  # [M] int32, index into the T rows of the batch
    temperature: Tensor  # [M] float32, below 1e-5 is greedy
    top_p: Tensor  # [M] float32, 1 is off, 0 is greedy
    top_k: Tensor  # [M] int32, 0 is off, 1 is greedy
    seed: Tensor  # [M] int64, all 64 bits count
    min_p: Tensor | None = None  # [M] float32, 0 is off; None: off everywhere


@dataclass(frozen=True)
class TokenValues:
    """A number for some tokens of some of A sequences, none of them twice: E entries."""

    sequence: Tensor  # [E] int32
    token: Tensor  # [E] int32
    value: Tensor  # [E] float32


@dataclass(frozen=True)
class LogitEdits:
    """What changes the logits of A of the sequences before a token is drawn. Written by the router.

    A row's history is its sequence's `history` and the nodes on its own path below the root, which the batch has: its
    tokens, and the ancestor bits, which are 0 at rows of no tree.
    """

    row: Tensor  # [R] int32, which of the M wanted rows
    sequence: Tensor  # [R] int32, the row's sequence among the A
    root: Tensor  # [R] int32, the first of this sequence's rows among the T of the batch
    history: TokenValues  # tokens of prompt and answer, the root included: how often the answer has them
    bias: TokenValues  # what is added
    banned: TokenValues  # the first absolute position where this token may be drawn
    repetition: Tensor  # [A] float32, above 0; 1 is off
    frequency: Tensor  # [A] float32, 0 is off
    presence: Tensor  # [A] float32, 0 is off


@dataclass(frozen=True)
class TokenMasks:
    """Which tokens may be drawn at R of the wanted rows; at the others all may. Written by the router."""

    row: Tensor  # [R] int32, which of the M wanted rows
    mask: Tensor  # [R] int32, which of U masks
    allowed: Tensor  # [U, W] int32 holding uint32 bits, LSB first: bit i of a mask is 1 where token i may be drawn


@dataclass(frozen=True)
class LogprobRows:
    """The rows whose log-probabilities somebody wants: D wanted rows, then P rows of prompts. Written by the router."""

    drawn: Tensor  # [D] int32, which of the M wanted rows; of the token that is drawn there
    row: Tensor  # [P] int32, index into the T rows of the batch
    token: Tensor  # [P] int32, of this token, which the prompt has next
    top: int  # and of so many of the most probable tokens


@dataclass(frozen=True)
class VerifyBatch:
    """One ragged step. Written by the router."""

    tokens: Tensor  # [T] int32 token ids
    positions: Tensor  # [T] int32 absolute positions
    slots: Tensor  # [T] int64 where each row's K/V goes: page * page_size + offset
    rows: Rows  # which rows and which committed slots each row attends to
    sampling: SamplingRows | None  # None: at every row the most probable token
    commit: Commit | None = None
    edits: LogitEdits | None = None  # None: every logit as the model gives it
    masks: TokenMasks | None = None  # after the edits
    logprobs: LogprobRows | None = None  # None: nobody wants any

    def check(self, page_size: int) -> None:
        """Raise ValueError where the batch contradicts itself or a pool of this page size."""
        lengths = {len(self.tokens), len(self.positions), len(self.slots), len(self.rows.ancestors)}
        if len(lengths) != 1:
            raise ValueError(f"tokens, positions, slots and ancestors of a batch differ in length: {sorted(lengths)}")
        if self.rows.page_size != page_size:
            raise ValueError(f"batch has pages of {self.rows.page_size} tokens, the pool of {page_size}")


@dataclass(frozen=True)
class Logprobs:
    """Log-probabilities of tokens at L rows, by the model's own logits. NaN where a logit of the row is NaN or infinite."""

    values: Tensor  # [L, 1 + K] float32: of the row's token, then of the K most probable ones, the best first
    ids: Tensor  # [L, 1 + K] int32, which tokens
    rank: Tensor  # [L] int32, of the row's token, from 1


@dataclass(frozen=True)
class VerifyResult:
    """What the target says. Written by the target, whose next step may write over the tensors.

    On a GPU it is on its way: all of it is there when the target's stream is done, what is on the host included.
    """

    # [M] int32 the target's own token at each wanted row; -1 where a logit of the row is NaN or infinite. What made it
    # so may have reached other rows of the same sequence, never another sequence.
    y: Tensor
    drawn: Tensor  # [M] int32, y on the host (on a CPU the same tensor)
    features: Tensor  # [T, F] target dtype: outputs of the feature layers side by side, in the order asked for
    commit_seconds: float  # host wall time of the commit where it ran apart from the forward, else 0
    logprobs: Logprobs | None = None  # on the host, of the rows of `VerifyBatch.logprobs` (L = D + P)
