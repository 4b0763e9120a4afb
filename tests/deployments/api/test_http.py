"""The OpenAI API of a running deployment, through the `openai` client."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import time
from collections import Counter
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from ddtree.deployments.api.generation import TextRequest
from ddtree.deployments.requests import GenerationRequest, SamplingParams

from ...conftest import Deployment

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
MODEL = "smollm2-135m-instruct"


def extension(**fields: Any) -> dict[str, Any]:
    return {"ddtree": {"return_token_ids": True} | fields}


def figures(answer: Any) -> dict[str, Any]:
    found: dict[str, Any] = answer.ddtree
    return found


def test_a_chat_answers(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, max_tokens=24)
    assert "Paris" in answer.choices[0].message.content
    assert answer.object == "chat.completion"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_developer_message_in_parts_is_a_system_message(client: openai.OpenAI) -> None:
    parts = [{"type": "text", "text": "Be brief."}]
    ask = {"model": MODEL, "temperature": 0, "max_completion_tokens": 6}
    one = client.chat.completions.create(messages=[{"role": "developer", "content": parts}, *QUESTION], **ask)
    two = client.chat.completions.create(messages=[{"role": "system", "content": "Be brief."}, *QUESTION], **ask)
    assert one.choices[0].message.content == two.choices[0].message.content
    assert one.usage.prompt_tokens == two.usage.prompt_tokens


@pytest.mark.parametrize("budget", [0, 8])
def test_max_tokens_is_exact(client: openai.OpenAI, budget: int) -> None:
    answer = client.completions.create(
        model=MODEL, prompt="Count: one, two, three,", temperature=0, max_tokens=8, extra_body=extension(budget=budget)
    )
    assert answer.usage.completion_tokens == 8
    assert len(figures(answer)["token_ids"]) == 8
    assert answer.choices[0].finish_reason == "length"
    assert figures(answer)["budget"] == budget


@pytest.mark.parametrize(
    ("sampling", "own"),
    [
        ({"temperature": 0}, {}),
        ({"temperature": 0.8, "seed": 42, "top_p": 0.95}, {"min_p": 0.02}),
        ({"temperature": 0, "frequency_penalty": 2}, {"min_tokens": 24}),
        (
            {"temperature": 0.8, "seed": 4, "presence_penalty": 0.7, "logit_bias": {"28": -5}},
            {"repetition_penalty": 1.2},
        ),
    ],
)
def test_speculative_equals_plain(client: openai.OpenAI, sampling: dict[str, Any], own: dict[str, Any]) -> None:
    def ask(budget: int) -> Any:
        body = extension(budget=budget) | own
        return client.chat.completions.create(
            model=MODEL, messages=QUESTION, max_tokens=24, extra_body=body, **sampling
        )

    plain, speculative = ask(0), ask(16)
    assert figures(plain)["token_ids"] == figures(speculative)["token_ids"]
    assert plain.choices[0] == speculative.choices[0]
    found = figures(speculative)
    assert found["drafted_tokens"] > 0
    assert sum(found["acceptance_histogram"]) == found["rounds"]
    assert found["acceptance_length"] == pytest.approx(1 + found["accepted_tokens"] / found["rounds"])
    assert set(found["stage_seconds"]) == {"draft", "build", "verify", "accept", "commit"}


def test_a_seed_reproduces_and_its_absence_varies(client: openai.OpenAI) -> None:
    def ask(**fields: Any) -> str:
        answer = client.completions.create(model=MODEL, prompt="Once", temperature=1.5, max_tokens=12, **fields)
        return answer.choices[0].text

    assert ask(seed=7) == ask(seed=7)
    assert ask() != ask()


def test_choices_draw_with_the_seeds_that_follow(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "temperature": 1.0, "max_tokens": 8}
    alone = [client.chat.completions.create(**ask, seed=seed).choices[0].message.content for seed in (7, 8)]
    answer = client.chat.completions.create(**ask, seed=7, n=2)
    assert [choice.message.content for choice in answer.choices] == alone
    chunks = list(client.chat.completions.create(**ask, seed=7, n=2, stream=True))
    for index, text in enumerate(alone):
        own = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert "".join(choice.delta.content or "" for choice in own) == text


def test_tokens_of_a_chat_are_those_that_it_is_charged_for(client: openai.OpenAI, server: str, tokenizer: Any) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=1)
    found = httpx.post(f"{server}/tokenize", json={"messages": QUESTION}).json()
    assert (found["count"], found["max_model_len"]) == (answer.usage.prompt_tokens, 8192)
    back = httpx.post(f"{server}/detokenize", json={"tokens": found["tokens"]}).json()
    assert back == {"prompt": tokenizer.decode(found["tokens"])}
    assert "/v1/completions" in httpx.get(f"{server}/openapi.json").json()["paths"]


def test_the_stream_of_a_chat(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 20}
    whole = client.chat.completions.create(**ask)
    usage = {"include_usage": True}
    fixed = extension(budget=16)  # one that adapts may compute a context again, and that gives a token without a round
    chunks = list(client.chat.completions.create(**ask, stream=True, stream_options=usage, extra_body=fixed))
    *content, last, final = chunks
    assert content[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in [*content, last])
    assert text == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in content] == [None] * len(content)
    assert last.choices[0].finish_reason == whole.choices[0].finish_reason
    assert final.choices == []
    assert (final.usage.prompt_tokens, final.usage.total_tokens) == (
        whole.usage.prompt_tokens,
        whole.usage.total_tokens,
    )
    rounds = figures(last)["rounds"]
    assert len(content) + 1 <= 1 + 1 + rounds, "the role, the prefill's token, and at most one chunk a round"
    assert len({chunk.id for chunk in chunks}) == 1


def test_the_stream_of_completions_over_the_wire(server: str) -> None:
    body = {"prompt": ["One, two,", "😀😀😀😀😀😀"], "temperature": 0, "max_tokens": 10}
    whole = httpx.post(f"{server}/v1/completions", json=body, timeout=120).json()
    streamed = httpx.post(f"{server}/v1/completions", json=body | {"stream": True}, timeout=120)
    assert streamed.headers["content-type"].startswith("text/event-stream")
    events = [line.removeprefix("data: ") for line in streamed.text.split("\n\n") if line]
    assert events.count("[DONE]") == 1
    assert events[-1] == "[DONE]"
    texts = ["", ""]
    for event in events[:-1]:
        choice = json.loads(event)["choices"][0]
        texts[choice["index"]] += choice["text"]
        assert "\ufffd" not in choice["text"] or choice["finish_reason"], "half a character may only be left at the end"
    assert texts == [choice["text"] for choice in whole["choices"]]
    assert [choice["index"] for choice in whole["choices"]] == [0, 1]
    assert whole["usage"]["completion_tokens"] == 20


def test_korean_and_emoji_arrive_whole(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {
        "model": MODEL,
        "prompt": "사과, 바나나, 사과, 바나나, 😀🎉😀🎉",
        "temperature": 0,
        "max_tokens": 24,
    }
    pieces = [chunk.choices[0].text for chunk in client.completions.create(**ask, stream=True)]
    assert "".join(pieces) == client.completions.create(**ask).choices[0].text
    assert not any("\ufffd" in piece for piece in pieces[:-1])


def test_a_stop_string_inside_an_accepted_path(client: openai.OpenAI, tokenizer: Any) -> None:
    ask: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 24}
    text = client.chat.completions.create(**ask).choices[0].message.content
    stop = text[9:14]  # cuts words and tokens
    for fields in ({}, {"stream": True}):
        answer = client.chat.completions.create(**ask, stop=[stop, "never seen"], extra_body=extension(), **fields)
        if fields:
            chunks = list(answer)
            got = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            reason, ids = chunks[-1].choices[0].finish_reason, figures(chunks[-1])["token_ids"]
        else:
            got, reason = answer.choices[0].message.content, answer.choices[0].finish_reason
            ids = figures(answer)["token_ids"]
            assert answer.usage.completion_tokens == len(ids)
        assert got == text[: text.index(stop)]
        assert reason == "stop"
        assert stop in tokenizer.decode(ids)
        assert stop not in tokenizer.decode(ids[:-1])


def test_eos_ends_an_answer_and_is_not_text(client: openai.OpenAI, tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "Say only: Yes."}]
    answer = client.chat.completions.create(
        model=MODEL, messages=messages, temperature=0, max_tokens=60, extra_body=extension()
    )
    assert answer.choices[0].finish_reason == "stop"
    ids = figures(answer)["token_ids"]
    assert ids[-1] == tokenizer.eos_token_id
    assert tokenizer.eos_token_id not in ids[:-1]
    assert answer.choices[0].message.content == tokenizer.decode(ids[:-1])
    assert answer.usage.completion_tokens == len(ids)


def test_prompts_of_token_ids_equal_their_text(client: openai.OpenAI, tokenizer: Any) -> None:
    prompts = ["The sun is", "Water boils at"]
    ask: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 6}
    solo = [client.completions.create(prompt=prompt, **ask).choices[0].text for prompt in prompts]
    ids = [tokenizer.encode(prompt) for prompt in prompts]
    assert [choice.text for choice in client.completions.create(prompt=prompts, **ask).choices] == solo
    assert [choice.text for choice in client.completions.create(prompt=ids, **ask).choices] == solo
    assert client.completions.create(prompt=ids[0], **ask).choices[0].text == solo[0]


def test_a_crowd_gets_what_each_gets_alone(server: str) -> None:
    prompts = ["The sun is", "Water boils at", "def add(a, b):", "Roses are red,"]

    async def ask(client: openai.AsyncOpenAI, prompt: str, seed: int) -> str:
        answer = await client.completions.create(model=MODEL, prompt=prompt, temperature=0.7, seed=seed, max_tokens=10)
        return answer.choices[0].text

    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0, timeout=120) as client:
            alone = [await ask(client, prompt, i) for i, prompt in enumerate(prompts)]
            assert await asyncio.gather(*(ask(client, prompt, i) for i, prompt in enumerate(prompts))) == alone

    asyncio.run(run())


def test_extreme_sampling_is_defined(client: openai.OpenAI) -> None:
    def ask(**fields: Any) -> str:
        answer = client.completions.create(model=MODEL, prompt="The sun is", max_tokens=6, extra_body=fields)
        return answer.choices[0].text

    greedy = ask(temperature=0)
    assert ask(temperature=1e-6) == greedy
    assert ask(temperature=2, top_p=0) == greedy
    assert ask(temperature=2, top_k=1) == greedy
    assert ask(temperature=2, top_p=1, top_k=-1, seed=1) == ask(temperature=2, top_k=0, seed=1)


def test_biases_penalties_and_min_tokens_show(client: openai.OpenAI, tokenizer: Any) -> None:
    def ask(prompt: str = "Count: one, one, one,", **fields: Any) -> list[int]:
        ask = {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": 16}
        return figures(client.completions.create(**ask, extra_body=extension() | fields))["token_ids"]

    never = ask(logit_bias={str(token): -100 for token in ask()})
    assert not set(never) & set(ask())
    assert ask(logit_bias={"28": 100}) == [28] * 16
    most = [len(set(ask(frequency_penalty=penalty))) for penalty in (-2, 2)]
    assert most[0] < most[1]
    eos = tokenizer.eos_token_id
    assert ask(logit_bias={str(eos): 100}) == [eos]
    held = ask(logit_bias={str(eos): 100}, min_tokens=5)
    assert len(held) == 6 and held[-1] == eos and eos not in held[:-1]


def test_a_request_without_max_tokens_ends_as_openai_has_it(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="One, two, three, four,", temperature=0)
    assert answer.usage.completion_tokens == 16


def test_a_clients_name_heads_the_id_of_each_sequence() -> None:
    own = GenerationRequest("f00", (1, 2), 4, (), SamplingParams(), 0)
    named = [TextRequest(index, own, ("stop",)).named("n" * 70) for index in range(2)]
    assert [sequence.request.request_id for sequence in named] == [f"{'n' * 64}/{index}/f00" for index in range(2)]
    assert named[0] == TextRequest(0, dataclasses.replace(own, request_id=named[0].request.request_id), ("stop",))


def test_request_ids_come_back(server: str) -> None:
    given = httpx.get(f"{server}/version", headers={"x-request-id": "abc-1"})
    assert given.headers["x-request-id"] == "abc-1"
    assert httpx.get(f"{server}/version").headers["x-request-id"]


def test_models_version_and_health(server: str, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).max_model_len == 8192
    assert {"version", "python", "torch", "ray", "transformers"} <= set(httpx.get(f"{server}/version").json())
    assert httpx.get(f"{server}/health").status_code == 200


def scrape(server: str) -> Counter[str]:
    """Every sample of /metrics by name, added up over labels."""
    answer = httpx.get(f"{server}/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    found: Counter[str] = Counter()
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            assert sample.labels["model_name"] == MODEL
            found[sample.name] += sample.value  # type: ignore[assignment]  # a float
    return found


def test_metrics_count_what_answers_say(server: str, client: openai.OpenAI) -> None:
    before = scrape(server)
    answer = client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, max_tokens=20, extra_body=extension(budget=8)
    )
    after = scrape(server)
    after.subtract(before)
    found = figures(answer)
    assert after["vllm:spec_decode_num_accepted_tokens_total"] == found["accepted_tokens"] > 0
    assert after["vllm:spec_decode_num_accepted_tokens_per_pos_total"] == found["accepted_tokens"]
    assert after["vllm:spec_decode_num_draft_tokens_total"] == found["drafted_tokens"] == after["ddtree:tree_size_sum"]
    assert after["ddtree:tree_size_count"] == after["vllm:inter_token_latency_seconds_count"] == found["rounds"]
    assert after["vllm:prompt_tokens_total"] == answer.usage.prompt_tokens
    assert after["vllm:generation_tokens_total"] == answer.usage.completion_tokens
    assert after["vllm:prefix_cache_hits_total"] == found["cached_tokens"]
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_prefill_time"):
        assert after[f"vllm:{name}_seconds_count"] == 1
    assert after["ddtree:stage_seconds_total"] >= sum(found["stage_seconds"].values()) * 0.99
    now = before + after
    assert (now["vllm:num_requests_running"], now["vllm:num_requests_waiting"], now["ddtree:drafters"]) == (0, 0, 1)


def test_a_finished_request_is_a_line_of_the_log(deployment: Deployment) -> None:
    body = {"prompt": "One, two,", "temperature": 0, "max_tokens": 6, "ddtree": {"budget": 8}}
    name = {"x-request-id": "to-be-logged"}
    answer = httpx.post(f"{deployment.url}/v1/completions", json=body, headers=name, timeout=120).json()
    deadline = time.monotonic() + 20
    while not (found := re.search(r'\{.*"request_id": "to-be-logged/0/.*\}', deployment.log.read_text())):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    line = json.loads(found[0])
    assert (line["status"], line["finish_reason"], line["completion_tokens"]) == (200, "length", 6)
    assert {name: line[name] for name in answer["ddtree"]} == answer["ddtree"]
