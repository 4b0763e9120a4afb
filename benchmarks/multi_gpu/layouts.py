"""Where the parts of a deployment run, and the Serve config document that says so. Knows no service."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from ddtree.deployments.config import AppConfig

SHARE = 0.25  # of the verifier's first GPU, for a drafter whose configuration has no share
OWN = "own"


@dataclass(frozen=True)
class Layout:
    """A verifier split over so many ranks, with drafters on its first GPU or on `own` ones."""

    ranks: int
    own: bool = False

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Of "2" or "2+own". Raises ValueError."""
        ranks, plus, own = text.partition("+")
        if not ranks.isdecimal() or int(ranks) < 1 or (plus and own != OWN):
            raise ValueError(
                f"'{text}' is no layout; give the verifier's ranks, with +own for drafters on GPUs of their own: 2+own"
            )
        return cls(int(ranks), bool(plus))

    def __str__(self) -> str:
        return f"{self.ranks}+{OWN}" if self.own else str(self.ranks)

    def document(self, source: dict[str, Any]) -> dict[str, Any]:
        """A Serve config document of one application in this layout. Raises ConfigError where it cannot be."""
        document = copy.deepcopy(source)
        args = document["applications"][0]["args"]
        verifier, drafter = args.setdefault("verifier", {}), args.setdefault("drafter", {})
        verifier["tensor_parallel_size"] = self.ranks
        if self.ranks > 1:
            verifier["backend"] = "vllm"
        if verifier.get("device", "cpu") == "cuda":
            shared = drafter.get("num_gpus", SHARE)
            drafter["num_gpus"] = 1 if self.own else shared if shared < 1 else SHARE
        args.pop("hardware", None)
        AppConfig.parse(args, f"layout {self}")
        return document
