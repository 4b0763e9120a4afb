"""Log-probabilities of a running deployment, through the `openai` client: those of a whole forward, whatever is drafted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest
import torch

PROMPT = "The capital of France is"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
MODEL = "smollm2-135m-instruct"


def test_a_completion_is_a_whole_forward(client: openai.OpenAI, target_dir: Path, tokenizer: Any) -> None:
    from transformers import AutoModelForCausalLM

    ask: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 10, "echo": True, "logprobs": 2}
    own = {"prompt_logprobs": 1, "ddtree": {"return_token_ids": True}}
    answer = client.completions.create(**ask, temperature=0.8, seed=5, extra_body=own)
    found, text = answer.choices[0].logprobs, answer.choices[0].text
    prompt = tokenizer.encode(PROMPT)
    ids = prompt + answer.ddtree["token_ids"]  # type: ignore[attr-defined]
    model = AutoModelForCausalLM.from_pretrained(target_dir, dtype=torch.float32)
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    assert found.token_logprobs[0] is None
    assert found.token_logprobs[1:] == pytest.approx(
        [float(row[token]) for row, token in zip(expected, ids[1:], strict=True)], abs=1e-4
    )
    for row, token, others in zip(expected, found.tokens[1:], found.top_logprobs[1:], strict=True):
        assert token in others and len(others) in (2, 3)
        assert sorted(others.values())[-2:] == pytest.approx(row.topk(2).values.flip(0).tolist(), abs=1e-4)
    assert "".join(found.tokens) == text and text.startswith(PROMPT)
    assert [text[begin:].startswith(token) for begin, token in zip(found.text_offset, found.tokens, strict=True)]
    of_prompt = answer.choices[0].prompt_logprobs  # type: ignore[attr-defined]
    assert of_prompt[0] is None and len(of_prompt) == len(prompt)
    for token, one, value in zip(prompt[1:], of_prompt[1:], found.token_logprobs[1:], strict=False):
        assert one[str(token)]["logprob"] == value
    assert answer.usage.completion_tokens == 10


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.9, "seed": 3, "frequency_penalty": 0.8}])
def test_drafts_and_chunks_change_none(client: openai.OpenAI, sampling: dict[str, Any]) -> None:
    ask: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "max_tokens": 12, "logprobs": True, "top_logprobs": 2}

    def content(budget: int, **fields: Any) -> list[Any]:
        return ask_for(
            client.chat.completions.create(**ask, **sampling, **fields, extra_body={"ddtree": {"budget": budget}})
        )

    def ask_for(answer: Any) -> list[Any]:
        if not isinstance(answer, openai.Stream):
            assert len(answer.choices[0].logprobs.content) == answer.usage.completion_tokens
            return list(answer.choices[0].logprobs.content)
        found = [chunk.choices[0].logprobs for chunk in answer]
        return [one for part in found if part for one in part.content]

    plain, drafted, streamed = content(0), content(16), content(16, stream=True)
    for one, other, third in zip(plain, drafted, streamed, strict=True):
        assert one.token == other.token == third.token and one.bytes == other.bytes == third.bytes
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4) == third.logprob
        assert [x.token for x in one.top_logprobs] == [x.token for x in other.top_logprobs]


def test_a_stop_string_ends_them_where_it_ends_the_tokens(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "temperature": 0, "max_tokens": 20, "logprobs": 0}
    text = client.completions.create(**ask).choices[0].text
    stop = text[7:11]  # cuts words and tokens
    whole = client.completions.create(**ask, stop=stop)
    chunks = list(client.completions.create(**ask, stop=stop, stream=True))
    found = whole.choices[0].logprobs
    assert len(found.tokens) == whole.usage.completion_tokens < 20
    assert stop in "".join(found.tokens) and stop not in "".join(found.tokens[:-1])
    parts = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs]
    assert [token for part in parts for token in part.tokens] == found.tokens
    assert [at for part in parts for at in part.text_offset] == found.text_offset


@pytest.mark.parametrize("prompts", [PROMPT, [PROMPT, "One, two, three"]])
def test_a_prompt_alone(client: openai.OpenAI, prompts: Any) -> None:
    ask: dict[str, Any] = {"model": MODEL, "prompt": prompts, "max_tokens": 0, "echo": True, "logprobs": 1}
    answer = client.completions.create(**ask, temperature=0)
    assert answer.usage.completion_tokens == 0
    texts = [prompts] if isinstance(prompts, str) else prompts
    assert [choice.text for choice in answer.choices] == texts
    for choice, text in zip(answer.choices, texts, strict=True):
        assert "".join(choice.logprobs.tokens) == text
        assert choice.logprobs.token_logprobs[0] is None and all(x < 0 for x in choice.logprobs.token_logprobs[1:])


def test_a_long_prompt_twice(client: openai.OpenAI) -> None:
    """Longer than a chunk, and kept by the time that it comes again."""
    ask: dict[str, Any] = {
        "model": MODEL,
        "prompt": [list(range(20, 320))],
        "max_tokens": 1,
        "echo": True,
        "logprobs": 0,
    }
    first, second = (client.completions.create(**ask, temperature=0) for _ in range(2))
    found = first.choices[0].logprobs.token_logprobs
    assert len(found) == 301
    assert found[1:] == pytest.approx(second.choices[0].logprobs.token_logprobs[1:], abs=1e-4)
    assert second.usage.prompt_tokens_details.cached_tokens == 0
