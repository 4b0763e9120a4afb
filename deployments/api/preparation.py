"""A validated request to the sequences that the engine runs: prompt ids, lengths, budget, sampling.

Knows the model's limits and its tokenizer. Knows no HTTP and does not generate.
"""

from __future__ import annotations

import inspect
import secrets
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ddtree.deployments.api.errors import ApiError, BadRequest
from ddtree.deployments.api.generation import TextRequest
from ddtree.deployments.api.responses import Text, Tokens
from ddtree.deployments.api.tool_prompt import as_text, knows_tools, signatures
from ddtree.deployments.api.tools import OPEN, Tool
from ddtree.deployments.api.types import (
    INT64,
    ChatRequest,
    CompletionRequest,
    Conversation,
    Detokenize,
    GenerationFields,
    TokenizeChat,
    TokenizeText,
)
from ddtree.deployments.requests import Budget, EditParams, GenerationRequest, SamplingParams


@dataclass
class ApiSettings:
    """What the HTTP layer must know of the deployment. Written by whoever mounts the app."""

    model: str  # the served name
    context_length: int  # prompt + completion, in tokens
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    default_budget: Budget  # may change while requests are served
    max_budget: int
    max_body_bytes: int = 4 << 20
    max_choices: int = 128  # sequences that one request may start: prompts × n
    default_max_tokens: int = 16  # of /v1/completions, as OpenAI has it; a chat gets the rest of the context
    default_temperature: float = 1.0  # as OpenAI has it
    request_timeout_s: float | None = None  # from the request's arrival to its last token; None: no limit
    metrics_horizon: int | None = None  # deepest node of a tree, where answers have vLLM's figures of speculation
    otlp_endpoint: str | None = None  # where spans of requests are posted
    request_log: bool = False  # a line of JSON for every finished request
    keys: tuple[bytes, ...] = ()  # digests of the API keys; none: anybody may ask

    def most_nodes(self, budget: Budget) -> int:
        """That a tree may have with this budget, besides its root."""
        return self.max_budget if budget == "auto" else budget


@dataclass(frozen=True)
class Preparation:
    """Turns requests into sequences; every method raises ApiError with the reason where it cannot."""

    settings: ApiSettings
    tokenizer: Any  # a Hugging Face tokenizer

    def completion(self, request: CompletionRequest) -> list[TextRequest]:
        """Return `n` sequences per prompt."""
        self._check_count(len(request.prompts), request.choices)
        prompts = [self._ids(prompt, request.add_special_tokens is not False) for prompt in request.prompts]
        limit = request.max_tokens
        default = self.settings.default_max_tokens
        firsts = [self._sequence(ids, request, limit, "max_tokens", default) for ids in prompts]
        if request.echo:
            texts = [prompt if isinstance(prompt, str) else self._text(prompt) for prompt in request.prompts]
            pairs = zip(firsts, texts, strict=True)
            firsts = [replace(first, echo=text, prompt_only=limit == 0) for first, text in pairs]
        return _all_choices(firsts, request)

    def chat(self, request: ChatRequest) -> list[TextRequest]:
        """Return the `n` sequences of a conversation, rendered by the model's chat template."""
        self._check_count(1, request.choices)
        ids = self._encode(self._render(request, request.offered), bool(request.add_special_tokens))
        limit, param = request.max_tokens, "max_tokens"
        if request.max_completion_tokens is not None:
            limit, param = request.max_completion_tokens, "max_completion_tokens"
        first = self._sequence(ids, request, limit, param, self.settings.context_length)
        return _all_choices([first], request)

    def tokenize(self, request: TokenizeText | TokenizeChat) -> Tokens:
        """Return the tokens of a prompt or a conversation."""
        text = self._render(request) if isinstance(request, TokenizeChat) else request.prompt
        ids = self._encode(text, request.add_special_tokens)
        shown = self.tokenizer.convert_ids_to_tokens(ids) if request.return_token_strs else None
        return Tokens(count=len(ids), max_model_len=self.settings.context_length, tokens=ids, token_strs=shown)

    def detokenize(self, request: Detokenize) -> Text:
        """Return the text of tokens, special ones included."""
        self._check_ids(request.tokens, "tokens")
        return Text(prompt=self.tokenizer.decode(request.tokens, clean_up_tokenization_spaces=False))

    def _render(self, request: Conversation, offered: Sequence[Tool] = ()) -> str:
        """Return what the model's chat template makes of a conversation with these tools on offer."""
        if not getattr(self.tokenizer, "chat_template", None):
            raise BadRequest("This model has no chat template: use /v1/completions.", "messages")
        own = request.chat_template_kwargs or {}
        if taken := own.keys() & inspect.signature(self.tokenizer.apply_chat_template).parameters.keys():
            raise BadRequest(f"'chat_template_kwargs' may not set '{min(taken)}'.", "chat_template_kwargs")
        messages = [message.for_template() for message in request.messages]
        tools: list[dict[str, Any]] | None = signatures(offered) or None
        try:
            if not knows_tools(self.tokenizer.get_chat_template(tools=tools)):
                messages, tools = as_text(messages, offered), None
            text: str = self.tokenizer.apply_chat_template(
                messages,
                tools=tools,
                tokenize=False,
                add_generation_prompt=request.opens_answer,
                continue_final_message=bool(request.continue_final_message),
                **own,
            )
        except Exception as error:  # templates refuse conversations (say, two user turns in a row) in their own way
            raise BadRequest(f"The model's chat template refuses these messages: {error}.", "messages") from None
        return text

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
        return ids

    def check_model(self, model: str | None) -> None:
        """Raise a 404 unless `model` is the served one or left out."""
        if model not in (None, self.settings.model):
            raise ApiError(
                404,
                f"The model '{model}' does not exist here; this server has '{self.settings.model}'.",
                param="model",
                code="model_not_found",
            )

    def _check_count(self, prompts: int, choices: int) -> None:
        most = self.settings.max_choices
        if prompts * choices > most:
            param, each = ("n", f"{choices} choices for each of {prompts}") if choices > 1 else ("prompt", str(prompts))
            raise BadRequest(f"'{param}' asks for more than {most} answers: {each} prompts.", param)

    def _ids(self, prompt: str | list[int], add_special_tokens: bool) -> list[int]:
        if isinstance(prompt, str):
            return self._encode(prompt, add_special_tokens)
        self._check_ids(prompt, "prompt")
        return prompt

    def _text(self, ids: list[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def _check_ids(self, ids: Iterable[int], param: str) -> None:
        wrong = next((token for token in ids if not 0 <= token < self.settings.vocab_size), None)
        if wrong is not None:
            limit = self.settings.vocab_size - 1
            raise BadRequest(f"'{param}' has the token id {wrong}; this model's ids are 0 to {limit}.", param)

    def _sequence(
        self, ids: list[int], request: GenerationFields, limit: int | None, param: str, default: int
    ) -> TextRequest:
        """Return the first of a prompt's choices."""
        where = "prompt" if isinstance(request, CompletionRequest) else "messages"
        if not ids:
            raise BadRequest(f"'{where}' is empty: there is no token to start from.", where)
        context = self.settings.context_length
        room = context - len(ids)
        if room < (0 if limit == 0 else 1):
            raise BadRequest(
                f"The prompt has {len(ids)} tokens and the context {context}: no room is left for an answer.",
                where,
                "context_length_exceeded",
            )
        if limit is not None and limit > room:
            raise BadRequest(
                f"'{param}' is {limit}, but the prompt's {len(ids)} tokens leave {room} of the context of {context}.",
                param,
                "context_length_exceeded",
            )
        max_tokens = min(default, room) if limit is None else limit
        if (request.min_tokens or 0) > max_tokens:
            raise BadRequest(
                f"'min_tokens' is {request.min_tokens}, but the answer may have {max_tokens} tokens; ask for fewer, or for "
                f"more '{param}'.",
                "min_tokens",
            )
        logprobs, prompt_logprobs = _logprobs(request)
        budget = self._budget(request)
        generation = GenerationRequest(
            request_id=uuid.uuid4().hex,
            prompt_ids=tuple(ids),
            max_tokens=max(max_tokens, 1),
            stop_token_ids=self._stop_tokens(request),
            sampling=self._sampling(request),
            budget=self.settings.most_nodes(budget),
            adapts=budget == "auto",
            prefix_cache=request.ddtree.prefix_cache if request.ddtree else True,
            tells_rounds=bool(request.ddtree and request.ddtree.return_rounds),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            every_round=request.stream or bool(request.stops),
            grammar=self._grammar(request),
        )
        return TextRequest(
            0,
            generation,
            request.stops,
            include_stop=bool(request.include_stop_str_in_output),
            skip_special=request.skip_special_tokens is not False,
        )

    def _stop_tokens(self, request: GenerationFields) -> tuple[int, ...]:
        own = request.stop_token_ids or []
        self._check_ids(own, "stop_token_ids")
        return tuple(dict.fromkeys([*(() if request.ignore_eos else self.settings.eos_token_ids), *own]))

    def _sampling(self, request: GenerationFields) -> SamplingParams:
        temperature = self.settings.default_temperature if request.temperature is None else request.temperature
        return SamplingParams(
            temperature=temperature,
            top_p=1.0 if request.top_p is None else request.top_p,
            top_k=max(request.top_k or 0, 0),
            seed=_random_seed() if request.seed is None and temperature > 0 else request.seed or 0,
            min_p=request.min_p or 0.0,
            edits=self._edits(request),
        )

    def _edits(self, request: GenerationFields) -> EditParams | None:
        bias = {int(token): value for token, value in (request.logit_bias or {}).items()}
        self._check_ids(bias, "logit_bias")
        edits = EditParams(
            presence_penalty=request.presence_penalty or 0.0,
            frequency_penalty=request.frequency_penalty or 0.0,
            repetition_penalty=request.repetition_penalty or 1.0,
            logit_bias=tuple(bias.items()),
            min_tokens=request.min_tokens or 0,
            ignored_stops=self.settings.eos_token_ids if request.ignore_eos and request.min_tokens else (),
        )
        return None if edits == EditParams() else edits

    def _grammar(self, request: GenerationFields) -> str | None:
        constraint = request.constraint()
        param, grammar = constraint or ("", None)
        if isinstance(request, ChatRequest) and request.offered:
            if constraint:
                raise BadRequest(f"'{param}' constrains the answer, and so do 'tools': send one of them.", param)
            if OPEN in self.tokenizer.all_special_tokens:
                raise BadRequest(
                    f"This model has {OPEN} as a special token, which is not text: tools do not work.", "tools"
                )
            param, grammar = "tools", request.calls_grammar()
        if grammar is None:
            return None
        if not self.settings.eos_token_ids:
            raise BadRequest(f"This model has no end-of-sequence token, which '{param}' needs.", param)
        if not self.tokenizer.is_fast:
            raise BadRequest(
                f"This model's tokenizer is none of the library 'tokenizers', which '{param}' needs.", param
            )
        return grammar

    def _budget(self, request: GenerationFields) -> Budget:
        asked = request.ddtree.budget if request.ddtree else None
        if asked is None:
            return self.settings.default_budget
        if asked != "auto" and asked > self.settings.max_budget:
            most = self.settings.max_budget
            raise BadRequest(f"'ddtree.budget' is {asked}; this server's maximum is {most}.", "ddtree.budget")
        return asked


def _logprobs(request: GenerationFields) -> tuple[int | None, int | None]:
    """How many log-probabilities the engine is asked for, of the answer and of the prompt."""
    of_prompt = request.prompt_logprobs
    if isinstance(request, ChatRequest):
        return (request.top_logprobs or 0) if request.logprobs else None, of_prompt
    assert isinstance(request, CompletionRequest)
    if request.echo and request.logprobs is not None:
        of_prompt = max(request.logprobs, of_prompt or 0)
    return request.logprobs, of_prompt


def _all_choices(firsts: list[TextRequest], request: GenerationFields) -> list[TextRequest]:
    """Return `n` sequences for each of these, one prompt's after the other's."""
    choices = [(first, i) for first in firsts for i in range(request.choices)]
    return [replace(_choice(first, i, request), index=index) for index, (first, i) in enumerate(choices)]


def _choice(first: TextRequest, i: int, request: GenerationFields) -> TextRequest:
    """Return choice `i` of a prompt: as the first, with the seed + i, or one of its own where the client gave none."""
    if i == 0:
        return first
    sampling = first.request.sampling
    seed = (sampling.seed + i + INT64) % (2 * INT64) - INT64
    if request.seed is None and sampling.temperature > 0:
        seed = _random_seed()
    own = replace(first.request, request_id=uuid.uuid4().hex, sampling=replace(sampling, seed=seed))
    return replace(first, request=own)


def _random_seed() -> int:
    return secrets.randbits(63)
