"""Stage 3: the drafter learns from the target, which runs along and gives features and soft labels. Knows no prompts.

Many blocks are drafted in one row under one block-sparse mask (arXiv 2602.06036, section 4). The model runs in the target's
dtype, the optimiser on fp32 masters. On a GPU attention is compiled flex attention; on the CPU the masks are dense.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ddtree.drafter.config import DrafterConfig
from ddtree.drafter.dflash import DFlashModel
from ddtree.drafter.training.masks import AnchorMask, DocumentMask
from ddtree.drafter.training.muon import Optimiser
from ddtree.drafter.training.ops import cross_entropy_, row_logsumexp
from ddtree.drafter.training.options import Report, TrainOptions
from ddtree.drafter.training.rows import Blocks, Rows, batch_index, sample_blocks
from ddtree.drafter.training.target import Target

WARM_STEPS = 3  # of each process: compiling, so not counted as training time
LOGIT_CELLS = 16384 * 49152  # logits held at once
VALIDATION_BATCHES = 6
TICK_SECONDS = 1.0


@dataclass(frozen=True)
class Seen:
    """What the target says of a batch of rows."""

    features: Tensor  # [B, T, n·d], divided by the per-channel size
    hidden: Tensor  # [B, T, d], normed, for the head
    position: Tensor  # [B, T] int64 from each document's begin


Loss = Callable[[Blocks, Tensor, Seen], tuple[Tensor, Tensor, Tensor]]  # see Trainer.loss


def initialise(model: DFlashModel, final_norm: Tensor, seed: int) -> None:
    """Random weights; the final norm starts as the target's, residual outputs start small."""
    generator = torch.Generator().manual_seed(seed)
    small = 0.02 / (2 * len(model.layers)) ** 0.5
    with torch.no_grad():
        for name, param in model.named_parameters():
            if param.ndim == 1:
                param.fill_(0.0 if name.endswith("bias") else 1.0)
                continue
            std = small if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02
            std = param.shape[1] ** -0.5 if name == "fc.weight" else std
            param.copy_(torch.randn(param.shape, generator=generator) * std)
        model.norm.weight.copy_(final_norm)


def schedule(done: float, warmup: float) -> float:
    """Share of the learning rate at share `done` of the training time: linear rise, then a cosine to 2 %."""
    if done < warmup:
        return max(done, 1e-4) / warmup
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, (done - warmup) / (1 - warmup))))


class Trainer:
    """One drafter in training. `fit` goes on from `state_path` where that exists."""

    def __init__(
        self,
        options: TrainOptions,
        config: DrafterConfig,
        target: Target,
        train: Rows,
        validation: Rows,
        folder: Path,
        initial: DFlashModel | None = None,
    ) -> None:
        """`initial`: what a run begins with that has no state yet, for unscaled features; None: random weights."""
        for name, rows in (("training", train), ("validation", validation)):
            if len(rows) < options.batch:
                raise ValueError(
                    f"{len(rows)} rows of {options.context} tokens are too few for {name} batches of {options.batch}: "
                    "generate for longer, or give a smaller batch"
                )
        self.options, self.config, self.target = options, config, target
        self.train, self.validation = train, validation
        self.state_path, self.metrics_path = folder / "state.pt", folder / "metrics.jsonl"
        device = self.device = target.device
        self.flex = device.type == "cuda"
        self.documents = DocumentMask(options.batch, options.context, device)
        self.blocks = AnchorMask(options.batch, options.context, options.anchors, options.block, device)
        self.feature_size: Tensor | None = None  # [n·d] fp32
        self.step, self.elapsed = 0, 0.0
        self.model = DFlashModel(config)
        initialise(self.model, target.final_norm.float().cpu(), options.seed)
        self.model.to(device)
        self.warm = initial is not None
        if initial is not None:
            self.model.load_state_dict(initial.state_dict())
            if not self.state_path.exists():
                self._scale_features()
        self.optimiser = Optimiser(
            self.model.parameters(), options.learning_rate, options.norm_learning_rate, options.decay
        )
        self.model.to(target.dtype)
        if self.flex:
            for layer in self.model.layers:
                layer.compile(dynamic=False)

    # ---- one batch

    @torch.no_grad()
    def observe(self, rows: Rows) -> Seen:
        """Runs the target over packed rows `[B, T]`."""
        self.documents.start.copy_(rows.start)
        position = torch.arange(self.options.context, device=self.device) - rows.start.long()
        mask = self.documents.block_mask() if self.flex else self.documents.dense()
        features, hidden = self.target.observe(rows.token.long(), position, self.config.target_layer_ids, mask)
        if self.feature_size is None:  # the first token of a document is left out: its features are huge
            counted = features[position > 0].float()
            self.feature_size = counted.square().mean(0).sqrt().clamp(min=1e-4)
        return Seen(features / self.feature_size.to(features.dtype), hidden, position)

    @torch.no_grad()
    def _scale_features(self) -> None:
        """Measures their size on the first batch, for a model that has it in `fc`."""
        self.observe(self._rows())
        assert self.feature_size is not None
        self.model.fc.weight.mul_(self.feature_size)

    def _rows(self) -> Rows:
        """Of the next step."""
        o = self.options
        return self.train.take(batch_index(len(self.train), o.batch, self.step, o.seed).to(self.device))

    def draft(self, blocks: Blocks, seen: Seen) -> Tensor:
        """Hidden states of the slots after the bonus token, `[B, A, block-1, d]`."""
        self.blocks.anchor.copy_(torch.where(blocks.used, blocks.anchor, 0))
        self.blocks.start.copy_(torch.where(blocks.used, blocks.start, 0))
        mask = self.blocks.block_mask() if self.flex else self.blocks.dense()
        ids = torch.full_like(blocks.token, self.config.mask_token_id)
        ids[:, :, 0] = blocks.token[:, :, 0]
        embedded = F.embedding(ids.flatten(1), self.target.embedding)
        embedded.requires_grad_()  # as later layers' inputs do: one compiled layer serves all
        context = self.model.fuse(seen.features)
        out = self.model(embedded, blocks.position.flatten(1), context, seen.position, mask)
        return out.unflatten(1, blocks.token.shape[1:])[:, :, 1:]

    @torch.no_grad()
    def loss(self, blocks: Blocks, drafted: Tensor, seen: Seen) -> tuple[Tensor, Tensor, Tensor]:
        """Weighted cross-entropy of `draft`'s slots.

        Returns:
            `(loss [], gradient of drafted, hits [B, A, block-1])`; a hit is a slot whose most likely token is the text's.
        """
        head, flat = self.target.head, drafted.detach().reshape(-1, drafted.shape[-1])
        grad = torch.empty_like(flat)

        def take(part: slice, gradient: Tensor) -> None:
            grad[part] = gradient @ head

        loss, total, hits = self.score(blocks, seen, lambda part: F.linear(flat[part], head), take)
        return loss, (grad / total).view_as(drafted), hits

    @torch.no_grad()
    def score(
        self, blocks: Blocks, seen: Seen, logits: Callable[[slice], Tensor], take: Callable[[slice, Tensor], None]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Weighted cross-entropy of the slots after the bonus token, some at a time, their logits being large.

        Args:
            logits: of so many of all slots, `[n, V]`, which are overwritten.
            take: gets their gradient, to be divided by the sum of the weights.
        Returns:
            `(loss [], sum of the weights [], hits [B, A, block-1])`.
        """
        head, width = self.target.head, self.options.context
        k = torch.arange(self.config.horizon, device=self.device)
        weight = torch.exp(-k / self.options.slot_decay) * blocks.wanted[:, :, 1:]
        total = weight.sum()
        soft = torch.where(blocks.greedy, 0.0, 1.0)[:, :, None].expand_as(weight).reshape(-1).contiguous()
        row = torch.arange(len(weight), device=self.device)[:, None, None] * width
        teacher_row = (row + blocks.at[:, :, :-1]).reshape(-1).int()
        label, weight = blocks.token[:, :, 1:].reshape(-1), weight.reshape(-1)
        teacher = F.linear(seen.hidden.flatten(0, 1), head)
        teacher_lse = row_logsumexp(teacher)
        losses, hits = [], []
        chunk = max(1, LOGIT_CELLS // len(head))
        for a in range(0, len(label), chunk):
            c = slice(a, a + chunk)
            x = logits(c)
            some, hit = cross_entropy_(x, teacher, teacher_lse, teacher_row[c], label[c], weight[c], soft[c])
            take(c, x)
            losses.append(some)
            hits.append(hit)
        hit_all = torch.cat(hits).view_as(blocks.wanted[:, :, 1:]) * blocks.wanted[:, :, 1:]
        return torch.cat(losses).sum() / total, total, hit_all

    # ---- the loop

    def fit(self, report: Report) -> None:
        """Trains until `options.training` seconds are used, over all runs; validates, logs and saves on the way.

        `report` is called about once a second; if it raises, the state is saved first.
        """
        o, headline = self.options, "started"
        if self.state_path.exists():
            self._restore()
            headline = "resumed"
        elif self.warm:
            self._save()
            headline = self._log()
        generator = torch.Generator(self.device).manual_seed(o.seed * 7919 + self.step)
        warm, counted, total = 0, 0, torch.zeros((), device=self.device)
        last = saved = told = 0.0
        while self.elapsed < o.training:
            now = time.time()
            if now - told > TICK_SECONDS:
                self._tell(report, headline)
                told, last = now, time.time()
            total += self._learn(generator)
            warm, counted = warm + 1, counted + 1
            if warm <= WARM_STEPS or self.step % 10 == 0:
                self._synchronise()
            now = time.time()
            self.elapsed += now - last if warm > WARM_STEPS else 0.0
            last, saved = now, now if warm <= WARM_STEPS else saved
            if self.elapsed >= o.training or now - saved > o.save_seconds:
                self._save()
                headline = self._log(float(total) / counted)
                counted, total = 0, torch.zeros_like(total)
                saved = last = time.time()
        self._tell(report, headline)

    def _learn(self, generator: torch.Generator) -> Tensor:
        """One step; returns its loss `[]`."""
        o = self.options
        rows = self._rows()
        seen = self.observe(rows)
        blocks = sample_blocks(rows, o.anchors, o.block, generator)
        drafted = self.draft(blocks, seen)
        loss, grad, _ = self.loss(blocks, drafted, seen)
        drafted.backward(grad)
        self.optimiser.step(schedule(self.elapsed / o.training, o.warmup) * (o.initial_rate if self.warm else 1.0))
        self.step += 1
        return loss

    def validate(self, batches: int = VALIDATION_BATCHES, loss: Loss | None = None) -> dict[str, Any]:
        """Loss, chain acceptance (accepted + bonus) and share of right slots on fixed validation blocks.

        Acceptance is a mean over random positions. Predictable stretches weigh more there than among the rounds of
        decoding, which leap over them, so the number is higher than tokens per round (acceptance.py measures those). `loss`: in
        place of `self.loss`.
        """
        generator = torch.Generator(self.device).manual_seed(1)
        batches = min(batches, len(self.validation) // self.options.batch)
        losses, accepted = torch.zeros((), device=self.device), torch.zeros(2, 2, device=self.device)
        right = torch.zeros(2, 2, self.config.horizon, device=self.device)
        for step in range(batches):
            index = batch_index(len(self.validation), self.options.batch, step, seed=7)
            rows = self.validation.take(index.to(self.device))
            seen = self.observe(rows)
            blocks = sample_blocks(rows, self.options.anchors, self.options.block, generator)
            drafted = self.draft(blocks, seen).detach()
            one, _, hits = (loss or self.loss)(blocks, drafted, seen)
            losses += one
            length = 1 + hits.cumprod(-1).sum(-1)
            whole = blocks.wanted.all(-1)  # blocks that do not run past the end
            for side, mine in enumerate((blocks.greedy, ~blocks.greedy)):
                accepted[side] += torch.stack([(length * (whole & mine)).sum(), (whole & mine).sum()])
                slots = blocks.wanted[:, :, 1:] & mine[:, :, None]
                right[side] += torch.stack([(hits * slots).sum((0, 1)), slots.sum((0, 1))])
        greedy, sampled = (accepted[:, 0] / accepted[:, 1].clamp(min=1)).tolist()
        top = (right[:, 0] / right[:, 1].clamp(min=1)).tolist()
        return {
            "loss": round(float(losses) / max(1, batches), 4),
            "chain_greedy": round(greedy, 3),
            "chain_sampled": round(sampled, 3),
            "right_greedy": [round(x, 3) for x in top[0]],
            "right_sampled": [round(x, 3) for x in top[1]],
        }

    def finished_model(self) -> DFlashModel:
        """The drafter in fp32 on the CPU, for unscaled features: their size is folded into `fc`."""
        model = DFlashModel(self.config)
        masters = [m.detach().cpu() for m in self.optimiser.masters]
        with torch.no_grad():
            for param, master in zip(model.parameters(), masters, strict=True):
                param.copy_(master)
            if self.feature_size is not None:
                model.fc.weight.div_(self.feature_size.cpu())
        return model

    def _tell(self, report: Report, headline: str) -> None:
        done = min(1.0, self.elapsed / self.options.training)
        try:
            report("train", done, f"step {self.step}, {self.elapsed:.0f} s; {headline}")
        except BaseException:
            if self.step:
                self._save()
            raise

    def _log(self, loss: float | None = None) -> str:
        """Validates, adds a line to metrics.jsonl and returns it in short. `loss`: the mean since the line before."""
        line = {
            "step": self.step,
            "seconds": round(self.elapsed, 1),
            **({} if loss is None else {"train_loss": round(loss, 4)}),
            "passes": round(self.step * self.options.batch / len(self.train), 2),
            **self.validate(),
        }
        with self.metrics_path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        trained = "" if loss is None else f"loss {loss:.3f}, "
        return (
            f"{trained}validation {line['loss']:.3f}, tokens per draft from a random position "
            f"{line['chain_greedy']:.2f} greedy {line['chain_sampled']:.2f} sampled, pass {line['passes']}"
        )

    def _save(self) -> None:
        partial = self.state_path.with_suffix(".partial")
        state = {"step": self.step, "elapsed": self.elapsed, "feature_size": self.feature_size}
        torch.save(state | {"optimiser": self.optimiser.state()}, partial)
        os.replace(partial, self.state_path)

    def _restore(self) -> None:
        state = torch.load(self.state_path, map_location="cpu", weights_only=True)
        self.step, self.elapsed = state["step"], state["elapsed"]
        self.feature_size = state["feature_size"].to(self.device)
        self.optimiser.restore(state["optimiser"])
        kept = [line for line in read_metrics(self.metrics_path) if line["step"] <= self.step]
        self.metrics_path.write_text("".join(json.dumps(line) + "\n" for line in kept))

    def _synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of metrics.jsonl."""
    if path.exists():
        yield from (json.loads(line) for line in path.read_text().splitlines())
