"""Stage 3: the drafter learns from the target, which runs along and gives features and soft labels. Knows no prompts.

Many blocks are drafted in one row under one block-sparse mask (arXiv 2602.06036, section 4). A path head may learn at the same
time, or alone beside a frozen drafter. The model runs in the target's dtype, the optimiser on fp32 masters. On a GPU attention is
compiled flex attention; on the CPU the masks are dense.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ddtree.drafter.config import DrafterConfig
from ddtree.drafter.dflash import DFlashModel
from ddtree.drafter.training.losses import Graded, Term, grade
from ddtree.drafter.training.masks import AnchorMask, DocumentMask
from ddtree.drafter.training.muon import Optimiser
from ddtree.drafter.training.options import Report, TrainOptions
from ddtree.drafter.training.path_learner import PathLearner
from ddtree.drafter.training.ranks import ALONE, Ranks
from ddtree.drafter.training.rows import Blocks, Rows, batch_index, sample_blocks
from ddtree.drafter.training.target import Target

WARM_STEPS = 3  # of each process: compiling, so not counted as training time
VALIDATION_BATCHES = 6
TICK_SECONDS = 1.0


@dataclass(frozen=True)
class Seen:
    """What the target says of a batch of rows."""

    features: Tensor  # [B, T, n·d], divided by the per-channel size
    hidden: Tensor  # [B, T, d], normed, for the head
    position: Tensor  # [B, T] int64 from each document's begin


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


class Score:
    """What validation adds up."""

    def __init__(self, horizon: int, device: torch.device) -> None:
        self.batches, self.loss = 0, torch.zeros((), device=device)
        self.accepted = torch.zeros(2, 2, device=device)  # greedy, sampled; tokens, blocks
        self.right = torch.zeros(2, 2, horizon, device=device)

    def add(self, blocks: Blocks, term: Term) -> None:
        """One batch."""
        self.batches += 1
        self.loss += term.loss
        length = 1 + term.hits.cumprod(-1).sum(-1)
        whole = blocks.wanted.all(-1)  # blocks that do not run past the end
        for side, mine in enumerate((blocks.greedy, ~blocks.greedy)):
            self.accepted[side] += torch.stack([(length * (whole & mine)).sum(), (whole & mine).sum()])
            slots = blocks.wanted[:, :, 1:] & mine[:, :, None]
            self.right[side] += torch.stack([(term.hits * slots).sum((0, 1)), slots.sum((0, 1))])

    def figures(self, ranks: Ranks) -> dict[str, Any]:
        """Of all processes, as JSON values."""
        ranks.sum_all_([self.accepted, self.right])
        greedy, sampled = (self.accepted[:, 0] / self.accepted[:, 1].clamp(min=1)).tolist()
        right = (self.right[:, 0] / self.right[:, 1].clamp(min=1)).tolist()
        return {
            "loss": round(float(self.loss) / max(1, self.batches), 4),
            "chain_greedy": round(greedy, 3),
            "chain_sampled": round(sampled, 3),
            "right_greedy": [round(x, 3) for x in right[0]],
            "right_sampled": [round(x, 3) for x in right[1]],
        }


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
        path: PathLearner | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        """
        Args:
            initial: what a run begins with that has no state yet, for unscaled features; None: random weights.
            path: a head that learns as well.
            ranks: the processes that share each batch. All have the same rows and weights.
        """
        if options.batch % ranks.count:
            raise ValueError(
                f"a batch of {options.batch} rows cannot be shared evenly by {ranks.count} processes: give another"
            )
        self.ranks = ranks
        for name, rows in (("training", train), ("validation", validation)):
            if len(rows) < options.batch:
                raise ValueError(
                    f"{len(rows)} rows of {options.context} tokens are too few for {name} batches of {options.batch}: "
                    "generate for longer, or give a smaller batch"
                )
        self.options, self.config, self.target, self.path = options, config, target, path
        self.path_share = options.path_joint / (1 + options.path_joint)
        self.train, self.validation = train, validation
        self.state_path, self.metrics_path = folder / "state.pt", folder / "metrics.jsonl"
        device = self.device = target.device
        self.flex = device.type == "cuda"
        share = options.batch // ranks.count
        self.documents = DocumentMask(share, options.context, device)
        self.blocks = AnchorMask(share, options.context, options.anchors, options.block, device)
        self.feature_size: Tensor | None = None  # [n·d] fp32
        self.step, self.elapsed = 0, 0.0
        self.model = DFlashModel(config)
        initialise(self.model, target.final_norm.float().cpu(), options.seed)
        self.model.to(device)
        self.warm, self.frozen = initial is not None, False
        self.resumed = bool(ranks.first(self.state_path.exists())[0])
        if initial is not None:
            self.model.load_state_dict(initial.state_dict())
            if not self.resumed:
                self._scale_features()
        self.optimiser = Optimiser(
            self.model.parameters(), options.learning_rate, options.norm_learning_rate, options.decay, ranks
        )
        self.model.to(target.dtype)
        self.optimiser.publish()
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
            squares, count = counted.square().sum(0), torch.tensor(float(len(counted)), device=self.device)
            self.feature_size = (self.ranks.sum_(squares) / self.ranks.sum_(count)).sqrt().clamp(min=1e-4)
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
        return self._take(self.train, batch_index(len(self.train), o.batch, self.step, o.seed))

    def _take(self, rows: Rows, index: Tensor) -> Rows:
        """This process's part of a batch."""
        return rows.take(index[self.ranks.part].to(self.device))

    def _sample(self, rows: Rows, generator: torch.Generator) -> Blocks:
        return sample_blocks(rows, self.options.anchors, self.options.block, generator, self.ranks)

    def draft(self, blocks: Blocks, seen: Seen) -> Tensor:
        """Hidden states of the slots after the bonus token, `[B, A, block-1, d]`."""
        self.blocks.anchor.copy_(torch.where(blocks.used, blocks.anchor, 0))
        self.blocks.start.copy_(torch.where(blocks.used, blocks.start, 0))
        mask = self.blocks.block_mask() if self.flex else self.blocks.dense()
        ids = torch.full_like(blocks.token, self.config.mask_token_id)
        ids[:, :, 0] = blocks.token[:, :, 0]
        embedded = F.embedding(ids.flatten(1), self.target.embedding)
        embedded.requires_grad_()  # as later layers' inputs do: one compiled layer serves all
        with torch.set_grad_enabled(not self.frozen):
            context = self.model.fuse(seen.features)
            out = self.model(embedded, blocks.position.flatten(1), context, seen.position, mask)
        return out.unflatten(1, blocks.token.shape[1:])[:, :, 1:]

    def grade(self, blocks: Blocks, drafted: Tensor, seen: Seen) -> tuple[Graded, list[tuple[Tensor, Tensor | None]]]:
        """`draft`'s slots, and with which gradients to go backward from where."""
        factors = self.path.factors(blocks, drafted) if self.path else None
        head, decay = self.target.head, self.options.slot_decay
        graded = grade(blocks, drafted, seen.hidden, head, decay, factors, self.path_share, self.ranks)
        back = [(drafted, graded.of_drafted)] if drafted.requires_grad else []
        return graded, back + ([(factors[0], graded.of_before)] if factors else [])

    # ---- the loop

    def fit(self, report: Report) -> None:
        """Trains until `options.training` seconds are used, over all runs; validates, logs and saves on the way.

        `report` is called about once a second; if it raises, the state is saved first.
        """
        o, headline = self.options, "started"
        if self.resumed:
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
            total += self.learn(generator, schedule(self.elapsed / o.training, o.warmup))
            warm, counted = warm + 1, counted + 1
            if warm <= WARM_STEPS or self.step % 10 == 0:
                self._synchronise()
            now = time.time()
            self.elapsed += now - last if warm > WARM_STEPS else 0.0
            last, saved = now, now if warm <= WARM_STEPS else saved
            self.elapsed, due = self.ranks.first(self.elapsed, now - saved > o.save_seconds)
            if self.elapsed >= o.training or due:
                self._save()
                headline = self._log(float(total) / counted)
                counted, total = 0, torch.zeros_like(total)
                saved = last = time.time()
        self._tell(report, headline)

    def learn(self, generator: torch.Generator, scale: float) -> Tensor:
        """One step at `scale` times the learning rates; returns its loss `[]`, the drafter's own unless that is frozen."""
        o, rows = self.options, self._rows()
        seen = self.observe(rows)
        blocks = self._sample(rows, generator)
        drafted = self.draft(blocks, seen)
        graded, back = self.grade(blocks, drafted, seen)
        torch.autograd.backward([root for root, _ in back], [gradient for _, gradient in back])
        if not self.frozen:
            self.optimiser.step(scale * (o.initial_rate if self.warm else 1.0))
        if self.path:
            self.path.step(graded, scale)
        self.step += 1
        term = graded.own or graded.path
        assert term is not None
        return term.loss

    def freeze(self, model: DFlashModel) -> None:
        """Only the path head learns from here on, beside a finished drafter, which takes unscaled features."""
        self.frozen, self.path_share = True, 1.0
        self.model.requires_grad_(False).load_state_dict(model.state_dict())  # which is compiled, on a GPU
        self.feature_size = torch.ones(model.fc.weight.shape[1], device=self.device)

    def validate(self, batches: int = VALIDATION_BATCHES) -> dict[str, Any]:
        """Loss, chain acceptance (accepted + bonus) and share of right slots on fixed validation blocks.

        Acceptance is a mean over random positions. Predictable stretches weigh more there than among the rounds of
        decoding, which leap over them, so the number is higher than tokens per round (acceptance.py measures those). With a
        path head the same of it under "path".
        """
        generator = torch.Generator(self.device).manual_seed(1)
        own, path = Score(self.config.horizon, self.device), Score(self.config.horizon, self.device)
        for step in range(min(batches, len(self.validation) // self.options.batch)):
            index = batch_index(len(self.validation), self.options.batch, step, seed=7)
            rows = self._take(self.validation, index)
            seen = self.observe(rows)
            blocks = self._sample(rows, generator)
            graded, _ = self.grade(blocks, self.draft(blocks, seen).detach(), seen)
            for score, term in ((own, graded.own), (path, graded.path)):
                if term:
                    score.add(blocks, term)
        figures = own.figures(self.ranks) if own.batches else {}
        return figures | ({"path": path.figures(self.ranks)} if path.batches else {})

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
        if self.ranks.leads:
            with self.metrics_path.open("a") as file:
                file.write(json.dumps(line) + "\n")
        trained = "" if loss is None else f"loss {loss:.3f}, "
        return (
            f"{trained}validation {line['loss']:.3f}, tokens per draft from a random position "
            f"{line['chain_greedy']:.2f} greedy {line['chain_sampled']:.2f} sampled, pass {line['passes']}"
        )

    def _save(self) -> None:
        if not self.ranks.leads:
            return
        partial = self.state_path.with_suffix(".partial")
        state: dict[str, Any] = {"step": self.step, "elapsed": self.elapsed, "feature_size": self.feature_size}
        state |= {"optimiser": self.optimiser.state(), "path": self.path and self.path.state()}
        torch.save(state, partial)
        os.replace(partial, self.state_path)

    def _restore(self) -> None:
        state = torch.load(self.state_path, map_location="cpu", weights_only=True)
        self.step, self.elapsed = state["step"], state["elapsed"]
        self.feature_size = state["feature_size"].to(self.device)
        self.optimiser.restore(state["optimiser"])
        if self.path:
            self.path.restore(state["path"])
        if not self.ranks.leads:
            return
        kept = [line for line in read_metrics(self.metrics_path) if line["step"] <= self.step]
        self.metrics_path.write_text("".join(json.dumps(line) + "\n" for line in kept))

    def _synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of metrics.jsonl."""
    if path.exists():
        yield from (json.loads(line) for line in path.read_text().splitlines())
