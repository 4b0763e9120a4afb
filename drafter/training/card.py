"""The model card of a finished run as Markdown, and the target's name in it. Knows no tensors and imports no torch."""

from __future__ import annotations

import json
import re
import textwrap
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ddtree.drafter.training.options import TrainOptions

MANIFEST = "ddtree.json"  # in the directory of an embedded target
WIDTH = 120
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


@dataclass(frozen=True)
class Facts:
    """What options and figures do not say; `facts.json`, written when training ends, so that the card never changes."""

    device: str
    torch: str  # version
    date: str  # ISO, of the end of training
    data: str  # one line on the answers

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Facts:
        return cls(**json.loads(path.read_text()))


def target_name(target_dir: Path) -> str:
    """The name in an embedded target's manifest, else the hub name in its config.json, else the folder's."""
    manifest, config = (_json(target_dir / name) for name in (MANIFEST, "config.json"))
    if manifest.get("name"):
        return str(manifest["name"])
    named = str(config.get("_name_or_path") or "")
    is_path = not _HUB_NAME.fullmatch(named) or Path(named).exists()
    return target_dir.resolve().name if is_path else named


def table(results: dict[str, dict[str, float]]) -> str:
    """`acceptance.measure`'s result as Markdown."""
    columns = list(next(iter(results.values()))) if results else []
    heads = [f"tree {c}" if c.isdigit() else c for c in columns]
    lines = ["| set | " + " | ".join(heads) + " |", "|---" * (len(columns) + 1) + "|"]
    for name, row in results.items():
        cells = (f"{row[c]:,.0f}" if c == "rounds" else f"{row[c]:.2f}" for c in columns)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def card(
    o: TrainOptions, target: str, facts: Facts, last: dict[str, Any], evaluation: dict[str, Any], megabytes: dict[str, float]
) -> str:  # fmt: skip
    """The card.

    Args:
        last: the last line of metrics.jsonl.
        evaluation: tables of `acceptance.measure` under `held_out` and `validation`.
        megabytes: size of the weights in each form, `{"bf16": …, "int8": …}`.
    """
    credit = f" ({o.target_credit})" if o.target_credit else ""
    files = f"the prompt files ({', '.join(path.stem for path in o.prompts)}), " if o.prompts else ""
    budgeted = o.generate_seconds is None and o.train_seconds is None
    budget = f" within a budget of {o.minutes:g} minutes" if budgeted else ""
    begun = f", begun with the weights of {o.initial.resolve().name}" if o.initial else ""
    head = f" A path head learnt with it, its loss at weight {o.path_joint:g}." if o.path_joint else ""
    rate = o.initial_rate if o.initial else 1.0
    sizes = ", ".join(f"{size:.1f} MB as {form}" for form, size in megabytes.items())
    text = f"""# A DFlash drafter for {target}

Made for {target}{credit}. {o.layers} layers, blocks of {o.block}: the first slot is the bonus token, the others are drafted
in one pass. Embedding and lm_head are the target's and not in here. `config.json` and the tensor names are those of
published DFlash checkpoints; the int8 form has one scale per row. Weights: {sizes}.

## Use

Give this folder's path (or, where it ships with the package, its name) as `drafter.checkpoint` of `ddtree serve`, together
with the target it was made for. A target of another shape is refused. One of the same shape with other weights is not
noticed: the output stays that target's own, but fewer drafted tokens are accepted.

## Data

{facts.data}. All answers are the target's own, about 40 % of them greedy, the rest at temperatures 0.7 and 1.0. The prompts
come from {files}Python functions (code) and passages (prose) of the packages installed where they were made, the project's
own wordings (task) and the target itself (invented); some continue or rework earlier answers (built). Held-out prompts were
left out of the prompt files; the other sources were not searched for them. No prompts or answers are part of this checkpoint.

## Recipe

`ddtree train-drafter`{budget}{begun}: {o.generation:.0f} s of generation, {o.training:.0f} s of training on {facts.device}, torch
{facts.torch}, {facts.date}. Muon at {rate * o.learning_rate:g} for matrices, AdamW at {rate * o.norm_learning_rate:g} for norms,
one warm-up and cosine over the training time; rows of {o.context:,} tokens with {o.anchors} blocks each, {o.batch} rows a step;
slot k weighs exp(-(k-1)/{o.slot_decay:g}); hard labels on greedy answers, the target's distribution on sampled ones.{head}
{last.get("step", 0):,} steps, {last.get("passes", 0)} passes over the data, last validation loss {last.get("loss", "unknown")}.
Positions past {o.context:,} were not seen in training.

## Acceptance

Mean tokens per round (the accepted ones and the bonus token), greedy, exact offline simulation of the int8 form: what the
target's own answer accepts, round by round, over its first {o.evaluate_tokens} tokens. `chain` is the most likely chain,
`tree N` the best-first tree of N nodes besides the root.

{_tables(o, evaluation)}

## Licence

{o.licence}. The target has its own licence.
"""
    head = f"---\nlicense: {o.licence}\nbase_model: {target}\ntags: [speculative-decoding, dflash, draft-tree]\n---\n"
    return head + "\n\n".join(_filled(block) for block in text.rstrip().split("\n\n")) + "\n"


def _tables(o: TrainOptions, evaluation: dict[str, Any]) -> str:
    titles = {
        "held_out": f"**Held-out prompts**, up to {o.evaluate_prompts} of each set.",
        "held_out_path": "**Held-out prompts**, chains and trees chosen by the path head.",
        "validation": "**Validation split**: flatters, because its prompts resemble the training data.",
    }
    parts = [f"{title}\n\n{table(evaluation[key])}" for key, title in titles.items() if evaluation.get(key)]
    return "\n\n".join(parts) or "Not measured."


def _filled(block: str) -> str:
    """A paragraph at an even width; tables stay as they are."""
    if block.startswith("|"):
        return block
    return textwrap.fill(" ".join(block.split()), WIDTH, break_long_words=False, break_on_hyphens=False)


def _json(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text())) if path.is_file() else {}
