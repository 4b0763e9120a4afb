"""`ddtree.load` and `ddtree.generate`: the service's answers from a function call, for a notebook or a script.

Prompts are prepared, decoded and turned into text by the code of the service, and the HTTP API's types say what a sampling
parameter may be. Knows no Ray.
"""

from __future__ import annotations

import tempfile
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedModel

from ddtree.deployments import models
from ddtree.deployments.api.constraints import ConstraintFields
from ddtree.deployments.api.errors import ApiError
from ddtree.deployments.api.generation import TextEvent, TextEvents, TextRequest
from ddtree.deployments.api.preparation import ApiSettings, Preparation
from ddtree.deployments.api.types import ChatRequest, CompletionRequest, parse
from ddtree.deployments.config import AppConfig
from ddtree.deployments.in_process import InProcess
from ddtree.deployments.requests import Budget, Delta, RequestStats
from ddtree.deployments.sequence import Sequence

MANY = 1 << 30  # prompts may wait: nobody else does
CONSTRAINTS = tuple(ConstraintFields.model_fields)
# Of a request's fields, what says how an answer is to be.
SAMPLING = (
    *("n", "stop", "stop_token_ids", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "min_tokens"),
    *("temperature", "top_p", "top_k", "min_p", "seed", "add_special_tokens"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"),
    *CONSTRAINTS,
)
TEXTUAL = ("stop", *CONSTRAINTS)  # of these, what needs a tokenizer
Prompts = Any  # text, token ids, a chat, or a list of any of these


@dataclass
class Answer:
    """What one prompt got."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)  # a stop token included
    finish_reason: str = ""  # "stop" or "length"
    stats: RequestStats = field(default_factory=RequestStats)  # rounds, drafted and accepted tokens, seconds by stage


@dataclass(frozen=True)
class Generation:
    """The answers to all prompts, in their order, and what they took."""

    answers: list[Answer]
    seconds: float  # from the first prompt to the last token; loading is not in it

    @property
    def texts(self) -> list[str]:
        return [answer.text for answer in self.answers]

    @property
    def token_ids(self) -> list[list[int]]:
        return [answer.token_ids for answer in self.answers]

    @property
    def tokens(self) -> int:
        """Generated in all."""
        return sum(map(len, self.token_ids))

    @property
    def tokens_per_round(self) -> float:
        """Tokens that a step of the target gave an answer, its first token (which the prompt's own step draws) left out."""
        rounds = sum(answer.stats.rounds for answer in self.answers)
        return sum(answer.stats.rounds + answer.stats.accepted_tokens for answer in self.answers) / max(1, rounds)


class Loaded:
    """A target with its drafter, ready to generate. Made by `load`; one thread at a time."""

    def __init__(self, config: AppConfig, found: models.Models, tokenizer: Any, kept: Any = None) -> None:
        """`kept`: what must live as long, the directory of the target."""
        self._kept = kept
        self._deltas: dict[str, deque[Delta | Exception]] = {}  # by request, what nobody has read yet
        self._engine = InProcess(config, found, self._emit)
        self.tokenizer, self._decoder = tokenizer, tokenizer or _NoText()
        most = config.tree.max_budget if found.drafter else 0
        settings = ApiSettings(
            model=found.served_name,
            context_length=found.max_context,
            vocab_size=found.target.vocab_size,
            eos_token_ids=found.target.eos_token_ids,
            default_budget="auto" if most else 0,
            max_budget=most,
            max_choices=MANY,
            default_temperature=0.0,
        )
        self._preparation = Preparation(settings, tokenizer)

    def generate(
        self, prompts: Prompts, *, max_tokens: int = 128, budget: Budget | None = None, **sampling: Any
    ) -> Generation:
        """The answers to all prompts; see `ddtree.generate`."""
        requests = self._requests(prompts, max_tokens, budget, sampling, stream=False)
        answers = [Answer() for _ in requests]
        began = time.perf_counter()
        for event in self._events(requests):
            answer = answers[event.index]
            answer.text += event.text
            answer.token_ids += event.token_ids
            answer.finish_reason, answer.stats = event.finish_reason or "", event.stats or answer.stats
        return Generation(answers, time.perf_counter() - began)

    def stream(
        self, prompts: Prompts, *, max_tokens: int = 128, budget: Budget | None = None, **sampling: Any
    ) -> Iterator[TextEvent]:
        """What each round brings: `event.text` and `event.token_ids` of prompt `event.index`. The last event of a prompt has a
        `finish_reason`. Who stops reading ends the rest. Takes what `generate` takes."""
        return self._events(self._requests(prompts, max_tokens, budget, sampling, stream=True))

    def _requests(
        self, prompts: Prompts, max_tokens: int, budget: Budget | None, sampling: dict[str, Any], *, stream: bool
    ) -> list[TextRequest]:
        """Raises ValueError."""
        if unknown := sampling.keys() - set(SAMPLING):
            raise ValueError(f"'{min(unknown)}' is no parameter of generate; valid are {', '.join(sorted(SAMPLING))}")
        body = {"max_tokens": max_tokens, "stream": stream, "ddtree": {"budget": budget}, **sampling}
        if self.tokenizer is None and (needs := sampling.keys() & set(TEXTUAL)):
            raise ValueError(f"'{min(needs)}' is about text, and this target has no tokenizer: give one to ddtree.load")
        found: list[TextRequest] = []
        try:
            for prompt in _each(prompts):
                found += self._prepared(prompt, body)
        except ApiError as error:
            raise ValueError(error.message) from None
        self._engine.time_steps(sequence.request for sequence in found)  # once, and no part of what is timed
        return [replace(sequence, index=index) for index, sequence in enumerate(found)]

    def _prepared(self, prompt: Any, body: dict[str, Any]) -> list[TextRequest]:
        chat = _all_are(prompt, dict)
        if self.tokenizer is None and (chat or isinstance(prompt, str)):
            raise ValueError("this target has no tokenizer: give one to ddtree.load, or token ids as prompts")
        if not chat:
            return self._preparation.completion(parse(CompletionRequest, {**body, "prompt": prompt}))
        if not getattr(self.tokenizer, "chat_template", None):
            raise ValueError("this target's tokenizer has no chat template: give texts or token ids as prompts")
        return self._preparation.chat(parse(ChatRequest, {**body, "messages": prompt}))

    def _events(self, requests: list[TextRequest]) -> Iterator[TextEvent]:
        running: dict[str, tuple[Sequence, TextEvents]] = {}
        try:
            for request in requests:
                name = request.request.request_id
                running[name] = self._engine.add(request.request), TextEvents(request, self._decoder)
                self._deltas[name] = deque()
            while running:
                self._engine.run()
                for name, (sequence, events) in list(running.items()):
                    for event in filter(None, map(events.take, self._taken(name))):
                        yield event
                        if event.finish_reason:
                            sequence.cancelled = True  # a stop string may have ended it before the engine does
                            del running[name], self._deltas[name]
                            break
        finally:
            for name, (sequence, _) in running.items():
                sequence.cancelled = True
                self._deltas.pop(name, None)
            self._engine.loop.drop_cancelled()

    def _taken(self, name: str) -> Iterator[Delta]:
        waiting = self._deltas[name]
        while waiting:
            delta = waiting.popleft()
            if isinstance(delta, Exception):
                raise delta
            yield delta

    def _emit(self, outgoing: list[tuple[Sequence, Delta | Exception]]) -> None:
        for sequence, delta in outgoing:
            if sequence.id in self._deltas:
                self._deltas[sequence.id].append(delta)


class _NoText:
    """Decodes to nothing."""

    def decode(self, token_ids: Any, /, **_: Any) -> str:
        return ""


def load(
    model: str | Path | PreTrainedModel,
    drafter: str | Path | None,
    *,
    tokenizer: Any = None,
    dtype: str | torch.dtype | None = None,
    device: str | None = None,
    backend: str = "hf",
    max_context: int | None = None,
    max_sequences: int = 16,
    max_budget: int = 63,
    kv_tokens: int | None = None,
) -> Loaded:
    """Load a target and its drafter.

    Args:
        model: an embedded model's name, a Hugging Face directory, or a transformers model. Of the last a copy is written to a
            temporary directory and read from there, so for a large one give its directory.
        drafter: a shipped checkpoint's name or a DFlash directory; None decodes plainly.
        tokenizer: a Hugging Face tokenizer; None takes the target's own, where it has one.
        dtype: "float32", "bfloat16" or "auto" (bfloat16 where the device is fast in it), or torch's; None: that of a transformers
            model, else "auto". Only in float32 is greedy output equal to transformers' `generate` to the token; in bfloat16 they
            part at near-ties.
        device: "cpu" or "cuda"; None: where a transformers model is, else "cuda" where there is one.
        backend: what runs the target, "hf" or "vllm".
        max_context: prompt + answer in tokens; None: the model's own limit.
        max_sequences: how many run at once; others wait.
        max_budget: nodes that a tree may have, at most.
        kv_tokens: KV rows of all sequences together; None: 32,768 on a CPU, what the memory leaves on a GPU.

    Raises:
        ValueError: what cannot be loaded, or not together. What JSON files can say is checked before weights load.
    """
    kept = None
    if isinstance(model, PreTrainedModel):
        kept = tempfile.TemporaryDirectory(prefix="ddtree-")
        dtype, device = dtype or model.dtype, device or model.device.type
        tokenizer = tokenizer or _tokenizer(str(model.name_or_path))
        model.save_pretrained(kept.name)
        if tokenizer is not None:
            tokenizer.save_pretrained(kept.name)
        model = kept.name
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device == "cuda"
    name = str(dtype or "auto").removeprefix("torch.")
    threads = torch.get_num_threads()
    config = AppConfig.parse(
        {
            "target": {"model": str(model), "dtype": name, "max_context": max_context},
            "verifier": {
                "backend": backend,
                "device": device,
                "threads": threads,
                "kv_tokens": kv_tokens or ("auto" if on_gpu else 32768),
            },
            "drafter": {
                "checkpoint": None if drafter is None else str(drafter),
                "device": device,
                "num_gpus": 0.3 if on_gpu else 0,  # a share of the verifier's
                "threads": threads,
                "dtype": name,
            },
            "tree": {"max_budget": max_budget},
            "scheduler": {"max_sequences": max_sequences, "max_waiting": MANY, "overlap": "off"},
        },
        "ddtree.load",
    )
    found = models.find(config)
    return Loaded(config, found, tokenizer or _tokenizer(found.target.model_dir), kept)


def generate(
    model: str | Path | PreTrainedModel,
    drafter: str | Path | None,
    prompts: Prompts,
    *,
    max_tokens: int = 128,
    budget: Budget | None = None,
    tokenizer: Any = None,
    dtype: str | torch.dtype | None = None,
    device: str | None = None,
    **sampling: Any,
) -> Generation:
    """Load and answer once; `ddtree.load` keeps the models for more calls.

    Args:
        model, drafter, tokenizer, dtype, device: see `load`.
        prompts: a text, a list of token ids, a chat (a list of {"role": ..., "content": ...}), or a list of any of these.
        max_tokens: of each answer, at most. An end-of-sequence token ends it before.
        budget: draft nodes a round; 0 decodes plainly, "auto" takes as many as pay; None: "auto" with a drafter.
        sampling: as in the HTTP API (docs/api.md), by the same names and with the same checks: temperature (by default
            0, greedy), top_p, top_k, min_p, seed (a random one by default), penalties, logit_bias, min_tokens, stop, n,
            response_format, ….

    Returns:
        Answers with texts, token ids and figures. The tokens are the target's own: those that plain decoding and the service give
        with the same seed.

    Raises:
        ValueError: says which argument is wrong, and what it may be.

    Example:
        >>> found = generate("smollm2-135m-instruct", "smollm2-135m", "The capital of France is", max_tokens=8)
        >>> found.texts[0], found.tokens_per_round  # doctest: +SKIP
    """
    loaded = load(model, drafter, tokenizer=tokenizer, dtype=dtype, device=device)
    return loaded.generate(prompts, max_tokens=max_tokens, budget=budget, **sampling)


def _tokenizer(directory: str | Path) -> Any:
    """None where there is none."""
    if not (Path(directory) / "tokenizer_config.json").is_file():
        return None
    return AutoTokenizer.from_pretrained(directory)


def _all_are(prompt: Any, kind: type) -> bool:
    return isinstance(prompt, list | tuple) and bool(prompt) and all(type(part) is kind for part in prompt)


def _each(prompts: Any) -> list[str | list[Any]]:
    """One prompt is one as well as a list of one."""
    if hasattr(prompts, "tolist"):
        prompts = prompts.tolist()  # of a tensor or an array
    if isinstance(prompts, str) or _all_are(prompts, int) or _all_are(prompts, dict):
        prompts = [prompts]
    if not isinstance(prompts, list | tuple) or not prompts:
        raise ValueError(
            f"prompts must be a text, token ids, a chat or a list of these, not empty; got {prompts!r:.60}"
        )
    for i, prompt in enumerate(prompts):
        if not (isinstance(prompt, str) or _all_are(prompt, int) or _all_are(prompt, dict)):
            raise ValueError(
                f"prompts[{i}] must be a text, a list of token ids or a list of messages; got {prompt!r:.60}"
            )
    return [prompt if isinstance(prompt, str) else list(prompt) for prompt in prompts]
