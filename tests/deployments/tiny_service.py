"""A whole service of tiny models with random weights on a Ray cluster of its own, deployed as `serve deploy` does."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
from ray.dashboard.modules.serve.sdk import ServeSubmissionClient

from ..conftest import free_port

SIZES = {
    "model_type": "qwen3", "vocab_size": 260, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 512,
}  # fmt: skip
DRAFTER = {
    **SIZES, "block_size": 4, "num_target_layers": 2, "num_hidden_layers": 1, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
    "dflash_config": {"mask_token_id": 259, "target_layer_ids": [0, 1]},
}  # fmt: skip
WAIT_S = 120


@dataclass(frozen=True)
class Service:
    """Its prompts are bytes: a token each."""

    document: dict[str, Any]
    dashboard: str
    url: str

    def arguments(self, **sections: dict[str, Any]) -> dict[str, Any]:
        """The configuration with these changes of sections."""
        args: dict[str, Any] = self.document["applications"][0]["args"]
        return args | {name: args.get(name, {}) | values for name, values in sections.items()}

    def deploy(self, *deployments: dict[str, Any], **sections: dict[str, Any]) -> None:
        """As `serve deploy` does: with these options of deployments and changes of sections."""
        (application,) = self.document["applications"]
        changed = application | {"deployments": list(deployments), "args": self.arguments(**sections)}
        ServeSubmissionClient(self.dashboard).deploy_applications(self.document | {"applications": [changed]})

    def health(self) -> dict[str, Any]:
        """Empty while it is not healthy."""
        try:
            answer = httpx.get(f"{self.url}/health", timeout=30)
        except httpx.TransportError:  # nobody listens yet, or nobody is there to answer
            return {}
        status: dict[str, Any] = answer.json() if answer.status_code == 200 else {}
        return status

    def wait(self, until: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Its health, when it is as wanted."""
        deadline = time.monotonic() + WAIT_S
        while not (status := self.health()) or not until(status):
            assert time.monotonic() < deadline, status
            time.sleep(0.05)
        return status

    def ask(self, prompt: str | Sequence[str], tokens: int = 150, **options: Any) -> dict[str, Any]:
        """The answer to a greedy request that must not fail. `options` are this API's own."""
        asked = {"return_token_ids": True, **options}
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ddtree": asked}
        answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=WAIT_S)
        assert answer.status_code == 200, answer.text
        content: dict[str, Any] = answer.json()
        return content


@contextmanager
def running(folder: Path, *deployments: dict[str, Any]) -> Iterator[Service]:
    """A service, until the block ends."""
    for name, sizes in (
        ("target", {**SIZES, "num_hidden_layers": 2, "tie_word_embeddings": False}),
        ("drafter", DRAFTER),
    ):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(sizes))
    exact = {"weights": "random", "dtype": "float32"}
    args = {
        "target": {"model": str(folder / "target"), **exact},
        "verifier": {"threads": 1, "kv_tokens": 8192},
        "tree": {"budget": 16},  # drafts of random weights are never right: auto would make none
        "drafter": {"checkpoint": str(folder / "drafter"), **exact, "threads": 1, "timeout_s": 30},
    }
    port = free_port()
    document = {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": port},
        "applications": [{"name": "ddtree", "import_path": "ddtree.deployments.app:build_app", "args": args}],
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DDTREE_CACHE", str(folder / "cache"))
        cluster = ray.init(
            address="local", num_cpus=2, include_dashboard=True, log_to_driver=False, object_store_memory=200 << 20
        )
        try:
            service = Service(document, f"http://{cluster.dashboard_url}", f"http://127.0.0.1:{port}")
            service.deploy(*deployments)
            service.wait(lambda status: bool(status["drafters"]))
            yield service
        finally:
            ray.shutdown()
