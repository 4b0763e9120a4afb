"""`ddtree eval-drafter`: what is to be measured, checked before models load, and the result as JSON values. Draws nothing."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddtree.deployments import models
from ddtree.deployments.commands.machine import Machine
from ddtree.deployments.commands.prompts import read_prompts
from ddtree.deployments.config import AppConfig, Device, read_document
from ddtree.deployments.errors import ConfigError

if TYPE_CHECKING:
    from ddtree.drafter.training.evaluation import DataSet, Evaluation
    from ddtree.drafter.training.tallies import Tally

MODEL = "smollm2-135m-instruct"
LARGEST = 1023  # nodes of a tree

Report = Callable[[str, float, str], None]


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions:
    """What the command is told; None is what the configuration says."""

    prompts: Sequence[Path]  # each a set, named by its stem
    config: Path | None = None  # a Serve config file; None: the embedded model and its drafter
    target: str | None = None
    drafter: str | None = None
    limit: int | None = None  # prompts of a set; None: all
    tokens: int = 128
    budgets: Sequence[int] = (8, 16, 32, 63, 255)
    detail: int | None = None  # the budget that is looked at closely; None: the middle one
    temperature: float = 0.0
    shared_noise: bool | None = None
    seed: int = 0
    top_k: int | None = None
    preceding: int = 0
    context: int = 2048  # without what precedes
    device: Device | None = None
    dtype: str | None = None
    threads: int | None = None
    json: Path | None = None  # where the result is to be written
    plot: Path | None = None  # and drawn, as PNG


def run(options: EvaluateOptions, report: Report) -> dict[str, Any]:
    """Measure, and return the result as JSON values.

    Args:
        report: told of (stage, fraction done, one line).

    Raises:
        ValueError, OSError: in one sentence; what can be seen without weights before they load.
    """
    _check(options)
    prompts = {path.stem: read_prompts(path, options.limit) for path in options.prompts}
    config = _config(options)
    found = models.find(config, lambda what, done, total: report("model", done / total, what))
    assert found.drafter and found.drafter_dir
    if found.target.latent_width is not None:
        raise ConfigError(
            f"{found.target.name} has latent attention, which is served but not run offline: measure with `ddtree bench`"
        )

    import numpy as np
    import torch

    from ddtree.deployments.budgets import DEPTHS, EDGES
    from ddtree.deployments.round_loop import NOISE_SHARE
    from ddtree.drafter.training.evaluation import EvaluationOptions, evaluate
    from ddtree.drafter.training.tallies import Cells
    from ddtree.verifier.dtype import resolve_dtype
    from ddtree.verifier.sampling import GREEDY_BELOW

    device = options.device or (config.verifier.device if options.config else _here())
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("there is no CUDA device here; give --device cpu")
    threads = options.threads or config.verifier.threads
    torch.set_num_threads(threads)
    temperature = options.temperature if options.temperature >= GREEDY_BELOW else 0.0
    shares = config.tree.shared_noise if options.shared_noise is None else options.shared_noise
    how = EvaluationOptions(
        target_dir=found.target.model_dir,
        drafter_dir=found.drafter_dir,
        budgets=tuple(options.budgets),
        tokens=options.tokens,
        temperature=temperature,
        noise_share=NOISE_SHARE if shares and temperature else 0.0,
        seed=options.seed,
        top_k=options.top_k or config.tree.top_k,
        path_head=config.drafter.path_head,
        preceding=options.preceding,
        context=min(found.max_context, found.drafter.max_positions),
        cells=Cells(tuple(round(float(edge), 6) for edge in np.exp(EDGES)), min(DEPTHS, found.horizon)),
        device=device,
        dtype=resolve_dtype(options.dtype or config.target.dtype, device),
    )
    done = evaluate(how, prompts, report)
    names = ("budgets", "tokens", "temperature", "noise_share", "seed", "top_k", "preceding", "context", "device")
    settings = {name: getattr(how, name) for name in names}
    settings |= {"limit": options.limit, "dtype": str(how.dtype).removeprefix("torch."), "threads": threads}
    settings["path_head"] = found.drafter.path_head and how.path_head
    settings["detail"] = options.detail or options.budgets[len(options.budgets) // 2]
    named = {"target": found.served_name, "drafter": config.drafter.checkpoint, "settings": settings}
    date = datetime.now(UTC).isoformat(timespec="seconds")
    return {**named, **figures(done), "machine": asdict(Machine.read()), "date": date}


def figures(done: Evaluation) -> dict[str, Any]:
    """Return the sets, all of them as one, and the time it took, as JSON values."""
    return {
        "sets": {name: _set(found) for name, found in done.sets.items()},
        "all": _set(done.overall),
        "seconds": {"answers": done.answer_seconds, "rounds": done.round_seconds},
    }


def _set(found: DataSet) -> dict[str, Any]:
    columns = {name: column(tally) for name, tally in found.columns.items()}
    return {"prompts": found.prompts, "left_out": found.left_out, "columns": columns}


def column(tally: Tally) -> dict[str, Any]:
    """Return the figures of one way to draft. Depths count from 1; of a cell without trials nothing is said."""
    depths = range(tally.cells.depths)
    return {
        "rounds": tally.rounds,
        "acceptance_length": tally.acceptance_length,
        "histogram": tally.histogram.tolist(),
        "by_depth": [
            {"depth": d + 1, "reached": int(n), "predicted": float(p / n), "accepted": float(a / n)}
            for d, (n, p, a) in enumerate(zip(tally.reached, tally.promised, tally.accepted, strict=True))
            if n
        ],
        "calibration_error": tally.calibration_error(),
        "calibration": _cells(tally, tally.trials.sum(0), tally.said.sum(0), tally.hits.sum(0)),
        "calibration_by_depth": [
            {
                "depth": d + 1,
                "and_deeper": d + 1 == tally.cells.depths < len(tally.reached),
                "calibration_error": tally.calibration_error(d),
                "cells": _cells(tally, tally.trials[d], tally.said[d], tally.hits[d]),
            }
            for d in depths
        ],
    }


def _cells(tally: Tally, trials: Any, said: Any, hits: Any) -> list[dict[str, Any]]:
    edges = (0.0, *tally.cells.edges, 1.0)
    return [
        {"above": edges[i], "to": edges[i + 1], "nodes": int(n), "predicted": float(s / n), "accepted": float(h / n)}
        for i, (n, s, h) in enumerate(zip(trials, said, hits, strict=True))
        if n
    ]


def _check(options: EvaluateOptions) -> None:
    if not options.prompts:
        raise ValueError("give prompts to measure on with --prompts FILE.jsonl, once for each set")
    stems = [path.stem for path in options.prompts]
    if again := sorted({stem for stem in stems if stems.count(stem) > 1}):
        raise ValueError(f"two prompt files are named {again[0]}; sets are told apart by the names of their files")
    if bad := [budget for budget in options.budgets if not 1 <= budget <= LARGEST]:
        raise ValueError(f"a tree of {bad[0]} nodes cannot be measured; budgets are from 1 to {LARGEST}")
    if options.detail is not None and options.detail not in options.budgets:
        raise ValueError(f"--detail {options.detail} is none of the budgets {', '.join(map(str, options.budgets))}")
    if options.plot and options.plot.suffix.lower() != ".png":
        raise ValueError(f"plots are PNG files: name {options.plot.name} something.png")
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib, which is not installed: pip install 'ddtree-serve[train]'")
    for out in (options.json, options.plot):
        if out and not out.resolve().parent.is_dir():
            raise ValueError(f"there is no folder {out.resolve().parent} to write {out.name} into")


def _config(options: EvaluateOptions) -> AppConfig:
    """The file's, for the models and the context that the options name."""
    source, args = str(options.config or "options"), {"target": {"model": MODEL}}
    if options.config:
        args = read_document(options.config)["applications"][0].get("args") or {}
    config = AppConfig.parse(args, source)
    if config.drafter.synthetic or "random" in (config.drafter.weights, config.target.weights):
        raise ConfigError(f"{source}: a synthetic drafter and random weights say nothing; name models with weights")
    if not (checkpoint := options.drafter or config.drafter.checkpoint):
        raise ConfigError(f"{source}: drafter.checkpoint is null; name a drafter with --drafter")
    longest = options.context + options.preceding
    longest = min(config.target.max_context or longest, longest)
    target = {"model": options.target or config.target.model, "max_context": longest}
    whole = config.model_dump()
    drafter = whole["drafter"] | {"checkpoint": checkpoint}
    return AppConfig.parse(whole | {"target": whole["target"] | target, "drafter": drafter}, source)


def _here() -> Device:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
