"""tree_build_path beside tree_build of the same sizes, and the noise for both."""

from __future__ import annotations

from dataclasses import fields
from functools import partial

import torch
from torch import Tensor

from ddtree.kernels import reference, share_noise_path, tree_build, tree_build_path

from .data import LEVELS, WIDTH, Candidates, full
from .measure import Contender
from .peers import Peers
from .report import Report

SECTION = "tree_build_path"
SETS = 4
WIDTHS = (32, WIDTH)
CASES = ((16, 1), (63, 1), (255, 1), (1023, 1), (63, 32), (255, 32))
QUICK = ((63, 1), (63, 32))


def run(report: Report, _: Peers) -> None:
    for width in WIDTHS:
        for budget, batch in QUICK if report.quick else CASES:
            _case(report, width, budget, batch)
        inputs = [_noisy(32, width, seed) for seed in range(SETS)]
        ours = Contender(
            "ddtree", [partial(share_noise_path, *given) for given in inputs], partial(_check_noise, inputs[0])
        )
        torchs = Contender("torch", [partial(reference.share_noise_path, *given) for given in inputs])
        report.compare("share_noise_path", {"width": width, "batch": 32}, [ours, torchs])
    report.remarks.append(f"tree_build_path: {LEVELS} depths, a row for each candidate of the depth before.")


def _case(report: Report, width: int, budget: int, batch: int) -> None:
    plain = [_narrow(Candidates.random(batch, seed), width) for seed in range(SETS)]
    wanted = full(batch, budget)
    given = [(c.logprobs[:, 0], c.conditional(i), c.ids, c.root, c.seq_len, wanted) for i, c in enumerate(plain)]
    calls = [partial(tree_build_path, *each, max_budget=budget) for each in given]
    without = [partial(tree_build, c.logprobs, c.ids, c.root, c.seq_len, wanted, max_budget=budget) for c in plain]
    contenders = [Contender("ddtree", calls, partial(_check, given[0], budget)), Contender("tree_build", without)]
    report.compare(SECTION, {"width": width, "budget": budget, "batch": batch}, contenders)


def _narrow(c: Candidates, width: int) -> Candidates:
    return Candidates(c.logprobs[..., :width].contiguous(), c.ids[..., :width].contiguous(), c.root, c.seq_len)


def _noisy(batch: int, width: int, seed: int) -> tuple[Tensor, ...]:
    c = _narrow(Candidates.random(batch, seed), width)
    numbers = torch.arange(batch, device="cuda") + seed, c.seq_len, torch.full((batch,), 0.65, device="cuda")
    return c.logprobs[:, 0].contiguous(), c.conditional(seed), c.ids, *numbers


def _check(given: tuple[Tensor, ...], budget: int) -> None:
    tree, expected = tree_build_path(*given, max_budget=budget), reference.tree_build_path(*given, max_budget=budget)
    for f in fields(expected):
        a, b = getattr(tree, f.name), getattr(expected, f.name)
        assert a == b if isinstance(b, int) else torch.equal(a, b), f"{f.name} differs from the reference's"


def _check_noise(given: tuple[Tensor, ...]) -> None:
    for a, b in zip(share_noise_path(*given), reference.share_noise_path(*given), strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-5)
