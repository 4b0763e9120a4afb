"""The stages in order, each leaving its result in out_dir so that the next run goes on from there."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ddtree.drafter.checkpoint import load_published
from ddtree.drafter.config import PATH_HEAD, PATH_KINDS, DrafterConfig, DrafterInfo, Rope, default_target_layer_ids
from ddtree.drafter.dflash import DFlashModel
from ddtree.drafter.path_head import PathHead
from ddtree.drafter.training import publish
from ddtree.drafter.training.acceptance import Ranking, Sample, measure
from ddtree.drafter.training.answers import Answers, AnswerStore, make_answers, summary
from ddtree.drafter.training.card import Facts, table, target_name
from ddtree.drafter.training.chat import ChatFormat, choose_mask_token, encode, load_tokenizer, stop_tokens
from ddtree.drafter.training.decoder import Decoder, Job
from ddtree.drafter.training.options import STAGES, Report, TrainOptions, quiet
from ddtree.drafter.training.path_learner import PathLearner, new_head
from ddtree.drafter.training.path_trainer import train_head
from ddtree.drafter.training.plot import save_plot
from ddtree.drafter.training.prompts import PromptSet, as_user_text, make_prompts, read_prompts
from ddtree.drafter.training.ragged import token_dtype
from ddtree.drafter.training.ranks import Ranks
from ddtree.drafter.training.rows import pack_rows, split
from ddtree.drafter.training.target import Target
from ddtree.drafter.training.trainer import Trainer, read_metrics

VALIDATION_SAMPLES = 48


def run(options: TrainOptions, report: Report) -> Path:
    """See `ddtree.drafter.training.train_drafter`."""
    ranks = Ranks.join()
    if ranks.leads:
        _claim(options)
    ranks.wait()
    stages = _Run(options, report if ranks.leads else quiet, ranks)
    for stage in STAGES[: STAGES.index(options.stop_after) + 1]:
        getattr(stages, stage)()
        ranks.wait()
    return options.out_dir / publish.PUBLISHED if options.stop_after == STAGES[-1] else options.out_dir


class _Run:
    """State shared by the stages; heavy parts are made when first needed."""

    def __init__(self, options: TrainOptions, report: Report, ranks: Ranks) -> None:
        self.ranks = ranks
        self.options, self.report, self.out = options, report, options.out_dir
        self.device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.target_config = json.loads((options.target_dir / "config.json").read_text())
        self.vocab = int(self.target_config["vocab_size"])
        longest = int(self.target_config.get("max_position_embeddings") or options.context)
        if options.context > longest:
            raise ValueError(f"context {options.context} is more than the {longest} positions of the target: lower it")
        self.initial = DrafterInfo.read(options.initial) if options.initial else None
        self.initial_head = self._check_initial(self.initial) if self.initial else None
        self.has_head = bool(options.path_rank or self.initial_head)
        if options.path_joint and not self.has_head:
            raise ValueError("path_joint trains a path head, and there is none: give its path_rank")
        self.tokenizer = load_tokenizer(options.target_dir)
        self.stop = stop_tokens(options.target_dir, self.tokenizer)
        self.store = AnswerStore(self.out / "answers", token_dtype(self.vocab), ranks.rank)
        self._target: Target | None = None

    @property
    def target(self) -> Target:
        if self._target is None:
            dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
            self._target = Target(self.options.target_dir, self.device, dtype)
        return self._target

    def prompts(self) -> None:
        path = self.out / "prompts.npz"
        if self.ranks.leads and not path.exists():
            make_prompts(self.options, self.vocab, self.report).save(path, token_dtype(self.vocab))

    def answers(self) -> None:
        if self.store.finished:
            return
        prompts = PromptSet.load(self.out / "prompts.npz")
        if not prompts.prompts:
            raise ValueError("there are no prompts: give JSONL files, or folders of Python files as sources")
        make_answers(self.options, prompts, self._decoder(), self.store, self.report, self.ranks)
        self.ranks.wait()
        if self.ranks.leads:
            self.store.finish()
            self.report("answers", 1.0, summary(self.store.load()[0]))
        self._free()

    def train(self) -> None:
        if (self.out / publish.INT8 / "config.json").exists():  # written last
            return
        answers, _ = self.store.load()
        initial = load_published(self.initial.checkpoint_dir, dtype=torch.float32) if self.initial else None
        config = initial.config if initial else self._config()
        trainer = self._trainer(answers, config, initial, self._path() if self.options.path_joint else None)
        trainer.fit(self.report)
        if self.ranks.leads:
            publish.facts(self.device, self.ranks.count, summary(answers)).save(self.out / "facts.json")
            publish.save_checkpoints(trainer.finished_model(), self.out, trainer.path.head if trainer.path else None)
        del trainer
        self._free()

    def path(self) -> None:
        if not self.has_head or (self.out / publish.INT8 / PATH_HEAD).exists():  # written last
            return
        model = load_published(self.out / publish.PUBLISHED, dtype=self.target.dtype, device=self.device)
        path = self._path()
        trainer = self._trainer(self.store.load()[0], model.config, path=path)
        found = train_head(trainer, model, self.report)
        if self.ranks.leads:
            (self.out / "path.json").write_text(json.dumps(found) + "\n")
            publish.save_head(path.head, self.out)
        del trainer, model
        self._free()

    def _path(self) -> PathLearner:
        """The initial drafter's head, else a new one."""
        o, embedding = self.options, self.target.embedding
        if self.initial_head:
            return PathLearner(self.initial_head.tensors, embedding, rate=o.initial_rate, ranks=self.ranks)
        return PathLearner(
            new_head(o.path_kind or PATH_KINDS[0], embedding, o.path_rank, o.seed), embedding, ranks=self.ranks
        )

    def _trainer(
        self,
        answers: Answers,
        config: DrafterConfig,
        initial: DFlashModel | None = None,
        path: PathLearner | None = None,
    ) -> Trainer:
        o = self.options
        rows = [pack_rows(answers, side, o.context, o.seed, self.device) for side in split(answers, o.validation_every)]
        return Trainer(
            o, config, self.target, rows[0], rows[1], folder=self.out, initial=initial, path=path, ranks=self.ranks
        )

    def _check_initial(self, initial: DrafterInfo) -> PathHead | None:
        """Its path head. Raises ValueError where the target or this training does not suit it."""
        o, c = self.options, self.target_config
        name = target_name(o.target_dir)
        initial.check_target(int(c["hidden_size"]), self.vocab, int(c["num_hidden_layers"]), name)
        ends = initial.embedding_scale, initial.logit_scale, initial.logit_softcap
        if ends != (1.0, 1.0, None) or not all(span.everything for span in initial.spans):
            raise ValueError(
                f"initial drafter {o.initial} has scaled embeddings or logits, or layers that do not see everything: "
                "such drafters are served, but not trained"
            )
        head = PathHead.load(initial, dtype=torch.float32, device="cpu")
        for name, given, its in (
            ("path_rank", o.path_rank or None, head and head.rank),
            ("path_kind", o.path_kind, head and head.kind),
        ):
            if head and given not in (None, its):
                raise ValueError(f"{name} is {given}, but that of the initial drafter's head is {its}: leave it out")
        return head

    def publish(self) -> None:
        if not self.ranks.leads:
            return
        path = self.out / "evaluation.json"
        evaluation = json.loads(path.read_text()) if path.exists() else self._evaluate(self.store.load()[0])
        path.write_text(json.dumps(evaluation, indent=1) + "\n")
        metrics, facts = list(read_metrics(self.out / "metrics.jsonl")), Facts.load(self.out / "facts.json")
        name = self.options.target_name or target_name(self.options.target_dir)
        self.report("publish", 0.95, save_plot(metrics, self.out / "training.png", name, facts.device))
        publish.save_card(self.options, name, facts, metrics, evaluation)
        for key, results in evaluation.items():
            self.report("publish", 1.0, f"{key}:\n{table(results)}")

    def _evaluate(self, answers: Answers) -> dict[str, Any]:
        o, out = self.options, dict[str, Any]()
        _, validation = split(answers, o.validation_every)
        greedy = [i for i in validation if answers.temperature[i] == 0][:VALIDATION_SAMPLES]
        own = [Sample("validation", answers.tokens[i], answers.prompt_length[i]) for i in greedy]
        models = {
            form: load_published(self.out / form, dtype=self.target.dtype, device=self.device)
            for form in (publish.INT8, publish.PUBLISHED)
        }
        self.report("publish", 0.1, "measuring on the validation split")
        for key, form in (("validation", publish.INT8), ("validation_bf16", publish.PUBLISHED)):
            out[key] = measure(models[form], self.target, own, longest=o.evaluate_tokens)
        info = DrafterInfo.read(self.out / publish.INT8)
        ranking = Ranking(head=PathHead.load(info, dtype=self.target.dtype, device=self.device))
        if ranking.head:
            out["validation_path"] = measure(
                models[publish.INT8], self.target, own, longest=o.evaluate_tokens, ranking=ranking
            )
        if o.evaluate:
            self.report("publish", 0.3, "the target answers held-out prompts")
            samples = list(self._held_out())
            self._free()
            self.report("publish", 0.5, f"measuring on {len(samples)} held-out answers")
            out["held_out"] = measure(models[publish.INT8], self.target, samples, longest=o.evaluate_tokens)
            if ranking.head:
                path = measure(models[publish.INT8], self.target, samples, longest=o.evaluate_tokens, ranking=ranking)
                out["held_out_path"] = path
        return out

    def _held_out(self) -> Iterator[Sample]:
        """The target's greedy answers to evenly chosen prompts of each evaluate file; prompts too long are left out."""
        o, chat = self.options, ChatFormat.of(self.tokenizer)
        longest = o.context - o.evaluate_tokens - o.block - 8
        jobs, names = list[Job](), list[str]()
        for path in o.evaluate:
            texts = [chat.prompt(as_user_text(field, text)) for field, text in read_prompts(path)]
            chosen = np.unique(np.linspace(0, len(texts) - 1, min(o.evaluate_prompts, len(texts))).astype(int))
            for ids in encode(self.tokenizer, [texts[i] for i in chosen]):
                if len(ids) <= longest:
                    jobs.append(Job(len(jobs), np.asarray(ids), 0.0, o.evaluate_tokens + o.block))
                    names.append(path.stem)
        slots = min(o.slots, max(1, len(jobs)))
        for answer in self._decoder(slots).generate(iter(jobs), deadline=float("inf"), wait_for_all=True):
            yield Sample(names[answer.job.key], answer.tokens, len(answer.job.prompt))

    def _decoder(self, slots: int | None = None) -> Decoder:
        o = self.options
        self.report("answers", 0.0, "loading the target")
        return Decoder(self.target, self.stop, slots or o.slots, o.context, o.seed + self.ranks.rank)

    def _config(self) -> DrafterConfig:
        o, c = self.options, self.target.config
        count = int(c.num_hidden_layers)
        spread = (min(max(i, 0), count - 1) for i in default_target_layer_ids(count, 5))
        mask = choose_mask_token(self.tokenizer, self.vocab) if o.mask_token_id is None else o.mask_token_id
        rope = getattr(c, "rope_parameters", None) or {}
        theta: Any = rope.get("rope_theta") or getattr(c, "rope_theta", 10000.0)
        return DrafterConfig(
            hidden_size=c.hidden_size,
            intermediate_size=c.intermediate_size,
            num_layers=o.layers,
            num_heads=c.num_attention_heads,
            num_kv_heads=self.target.kv_heads,
            head_dim=self.target.head_dim,
            vocab_size=self.vocab,
            num_target_layers=count,
            target_layer_ids=o.feature_layers or tuple(dict.fromkeys(spread)),
            block_size=o.block,
            mask_token_id=mask,
            max_positions=c.max_position_embeddings,
            rope=Rope(theta=float(theta)),
            rms_norm_eps=float(c.rms_norm_eps),
        )

    def _free(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def _claim(options: TrainOptions) -> None:
    """Makes out_dir this run's, or refuses."""
    path, mine = options.out_dir / "run.json", options.identity()
    if path.exists() and options.resume:
        theirs = json.loads(path.read_text())
        other = [f"{k} {theirs.get(k)!r} (now {v!r})" for k, v in mine.items() if theirs.get(k) != v]
        if other:
            raise ValueError(
                f"{options.out_dir} holds a run with other options: {', '.join(other)}; choose another out_dir"
            )
        return
    if options.out_dir.exists() and any(options.out_dir.iterdir()) and not options.resume:
        raise ValueError(f"{options.out_dir} is not empty: resume what it holds, or choose another out_dir")
    options.out_dir.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(mine, indent=1) + "\n")
