"""What a training run is told: the only place with defaults. Knows no tensors and imports no torch."""

from __future__ import annotations

import site
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ddtree.drafter.config import PATH_KINDS, DrafterInfo

Report = Callable[[str, float, str], None]  # (stage, fraction done 0..1, one line of text)
STAGES = ("prompts", "answers", "train", "path", "publish")
TILE = 128  # flex attention's block: on a GPU, context and packed blocks are whole tiles


def quiet(stage: str, fraction: float, message: str) -> None:
    """A `Report` that shows nothing."""


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Options of `train_drafter`; `metadata["help"]` of each field is its command-line help."""

    target_dir: Path = field(metadata={"help": "Hugging Face directory of the target, a causal language model"})
    out_dir: Path = field(metadata={"help": "folder for every stage's result; a killed run goes on from there"})
    prompts: tuple[Path, ...] = _option((), "JSONL files with prompt, question or turns, to train on")
    sources: tuple[Path, ...] = _option((), "folders of Python files to make prompts from; default: this Python's own")
    evaluate: tuple[Path, ...] = _option((), "JSONL files to measure on at the end; never trained on")
    minutes: float = _option(20.0, "time budget of the whole run")
    generate_seconds: float | None = _option(None, "time for the target's answers; default: 19 % of the budget")
    train_seconds: float | None = _option(None, "time for training; default: 62 % of the budget")
    initial: Path | None = field(
        default=None, metadata={"help": "drafter checkpoint of this target whose weights training begins with"}
    )
    initial_rate: float = _option(0.25, "share of the learning rates where training begins with such weights")
    layers: int = _option(0, "layers of the drafter; default: 4, or the initial drafter's")
    block: int = _option(0, "slots of one draft, the bonus token included; default: 16, or the initial drafter's")
    feature_layers: tuple[int, ...] = _option(
        (), "0-based target layers the drafter sees; default: five, spread out, or the initial drafter's"
    )
    mask_token_id: int | None = _option(
        None, "token id of an empty slot; default: an unused special token, or the initial drafter's"
    )
    device: str | None = _option(None, "torch device; default: cuda where there is one, else cpu")
    seed: int = _option(0, "of prompts, answers, weights and batches")
    resume: bool = _option(True, "go on with what out_dir holds; without it out_dir must be empty")
    stop_after: str = _option("publish", f"last stage to run: {', '.join(STAGES)}")
    functions: int = _option(14000, "Python functions to make code prompts from")
    passages: int = _option(9000, "prose passages to make reading prompts from")
    harvest_seconds: float = _option(60.0, "longest time to read Python files")
    slots: int = _option(3072, "answers generated at once; fewer where the device's memory is smaller")
    context: int = _option(1024, "tokens of one training row, and of the longest prompt with its answer")
    long_share: float = _option(
        0.0, "share of the later prompts that come after earlier conversations, up to any length that context allows"
    )
    max_new: int = _option(320, "tokens of one answer")
    batch: int = _option(0, "training rows of one step; default: as many as have 16,384 tokens")
    anchors: int = _option(0, "blocks drafted in one training row; default: a quarter of its tokens")
    path_rank: int = _option(0, "rank of a path head, trained when the drafter is; 0: none, or the initial drafter's")
    path_kind: str | None = _option(
        None, f"{', '.join(PATH_KINDS)} (path_head.py); default: {PATH_KINDS[0]}, or the initial drafter's"
    )
    path_joint: float = _option(
        0.0,
        "weight of its loss beside the drafter's own, 1, where both are trained at once; 0: it is trained afterwards",
    )
    path_seconds: float | None = _option(None, "time for its training afterwards; default: 6 % of the budget")
    learning_rate: float = _option(0.02, "of Muon, for the matrices")
    norm_learning_rate: float = _option(1e-3, "of AdamW, for the norms")
    decay: float = _option(0.01, "of the matrices, times the learning rate")
    warmup: float = _option(0.03, "share of the training time over which the learning rate rises")
    slot_decay: float = _option(7.0, "slot k weighs exp(-(k-1)/slot_decay)")
    validation_every: int = _option(100, "every how many-th prompt is kept for validation")
    save_seconds: float = _option(60.0, "time between training states")
    evaluate_prompts: int = _option(80, "prompts taken of each evaluate file")
    evaluate_tokens: int = _option(128, "answer tokens measured per prompt")
    target_name: str | None = _option(None, "target's name in the model card; default: what its directory says")
    target_credit: str | None = _option(None, "who made the target and under which licence, for the model card")
    licence: str = _option("apache-2.0", "SPDX name written into the model card")

    def __post_init__(self) -> None:
        for name in ("target_dir", "out_dir"):
            object.__setattr__(self, name, Path(getattr(self, name)))
        for name in ("prompts", "sources", "evaluate"):
            object.__setattr__(self, name, tuple(Path(p) for p in getattr(self, name)))
        self._take_shape()
        if self.stop_after not in STAGES:
            raise ValueError(f"stop_after {self.stop_after!r} is not a stage; known: {', '.join(STAGES)}")
        if self.path_kind not in (None, *PATH_KINDS):
            raise ValueError(f"path_kind {self.path_kind!r} is no kind of path head; known: {', '.join(PATH_KINDS)}")
        if not 0 <= self.long_share <= 1:
            raise ValueError(f"long_share {self.long_share:g} is a share: give 0 to 1")
        if self.path_joint < 0:
            raise ValueError(f"path_joint {self.path_joint:g} is a weight: give 0 or more")
        if not (self.target_dir / "config.json").is_file():
            raise ValueError(f"no target at {self.target_dir}: give a Hugging Face directory with config.json")
        missing = [str(p) for p in (*self.prompts, *self.sources, *self.evaluate) if not p.exists()]
        if missing:
            raise ValueError(f"not found: {', '.join(missing)}")
        if self.context <= self.max_new + 64:
            raise ValueError(f"context {self.context} leaves no room for prompts before {self.max_new} answer tokens")
        if self.context % TILE or self.anchors * self.block % TILE or TILE % self.block:
            raise ValueError(
                f"context and anchors × block must be multiples of {TILE}, and block a divisor of it; got context "
                f"{self.context}, anchors {self.anchors}, block {self.block}"
            )
        if self.anchors > self.context:
            raise ValueError(f"{self.anchors} anchors do not fit into rows of {self.context} tokens")

    def _take_shape(self) -> None:
        """Fills in the sizes that are not given; those of an initial drafter are its own, and nothing may contradict them."""
        usual: dict[str, Any] = {"layers": 4, "block": 16}
        rows: dict[str, Any] = {"batch": max(1, 16384 // max(1, self.context)), "anchors": self.context // 4}
        if self.initial is not None:
            object.__setattr__(self, "initial", Path(self.initial))
            made = DrafterInfo.read(self.initial)
            if made.random_weights:
                raise ValueError(f"initial drafter {self.initial} has no weights to begin with")
            usual = {"layers": made.num_layers, "block": made.block_size}
            usual |= {"feature_layers": made.target_layer_ids, "mask_token_id": made.mask_token_id}
        unset = {f.name: f.default for f in fields(self)}
        for name, value in (usual | rows).items():
            given = getattr(self, name)
            if given == unset[name]:
                object.__setattr__(self, name, value)
            elif self.initial is not None and name in usual and given != value:
                raise ValueError(f"{name} is {given}, but the initial drafter {self.initial} has {value}: leave it out")

    @property
    def generation(self) -> float:
        """Seconds for the answers."""
        return 60 * self.minutes * 0.19 if self.generate_seconds is None else self.generate_seconds

    @property
    def training(self) -> float:
        """Seconds for training; what the two shares leave is for loading, compiling, measuring and writing."""
        return 60 * self.minutes * 0.62 if self.train_seconds is None else self.train_seconds

    @property
    def path_training(self) -> float:
        """Seconds for the path head, which come on top of `training`."""
        return 60 * self.minutes * 0.06 if self.path_seconds is None else self.path_seconds

    @property
    def longest_prompt(self) -> int:
        """In tokens."""
        return self.context - self.max_new - 8

    def source_dirs(self) -> tuple[Path, ...]:
        """The folders to harvest: those given, else the standard library and the site-packages of this Python."""
        if self.sources:
            return self.sources
        own = [sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), *site.getsitepackages()]
        return tuple(dict.fromkeys(Path(p) for p in own if Path(p).is_dir()))

    def identity(self) -> dict[str, Any]:
        """What must not change between the runs that share an out_dir, as JSON values."""
        free = {"out_dir", "target_dir", "resume", "stop_after", "device", "evaluate", "minutes", "prompts", "sources"}
        free |= set() if self.path_joint else {"path_rank", "path_kind"}  # of a stage of its own, after the drafter's
        free |= {"path_seconds"}
        free |= {"save_seconds", "harvest_seconds", "slots", "evaluate_prompts", "evaluate_tokens"}
        free |= {"target_name", "target_credit", "licence"}
        named = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in free}
        named |= {"generate_seconds": self.generation, "train_seconds": self.training}
        named |= {"initial": self.initial and str(self.initial)}
        return {k: list(v) if isinstance(v, tuple) else v for k, v in named.items()}
