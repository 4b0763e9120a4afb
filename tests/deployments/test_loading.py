"""What a configuration says of a target reaches the target."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ddtree.deployments import models
from ddtree.deployments.config import AppConfig
from ddtree.deployments.in_process import InProcess
from ddtree.deployments.requests import Delta, GenerationRequest
from ddtree.deployments.sequence import Sequence
from ddtree.kernels.packed_linear import can_pack

from .tiny import VOCABULARY, make_drafter, make_target


@pytest.mark.skipif(
    not can_pack(torch.device("cpu"), torch.bfloat16), reason="oneDNN does not compute in bfloat16 on this CPU"
)
def test_a_batch_invariant_target_decodes_the_same_in_bfloat16(tmp_path: Path) -> None:
    """Random weights decide by little, so nearly every answer parts somewhere where rows depend on those beside them."""
    answers: dict[str, list[int]] = {}

    def emit(outgoing: list[tuple[Sequence, Delta | Exception]]) -> None:
        for sequence, delta in outgoing:
            assert isinstance(delta, Delta)
            answers.setdefault(sequence.id, []).extend(delta.token_ids)

    config = AppConfig.parse(
        {
            "target": {"model": str(make_target(tmp_path / "target")), "dtype": "bfloat16"},
            "verifier": {"threads": 1, "batch_invariant": True},
            "drafter": {"checkpoint": str(make_drafter(tmp_path / "drafter")), "threads": 1},
        }
    )
    local = InProcess(config, models.find(config), emit)
    for budget in (0, 16):
        for i in range(4):
            prompt = tuple((7 * i + j) % (VOCABULARY - 1) for j in range(3 + 5 * i))
            local.add(GenerationRequest(f"{budget} {i}", prompt, 64, (), budget=budget))
    while local.run():
        pass
    assert [answers[f"16 {i}"] for i in range(4)] == [answers[f"0 {i}"] for i in range(4)]
    assert all(len(answer) == 64 for answer in answers.values())
