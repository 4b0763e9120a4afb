"""The requests of the HTTP API and what each field may be. Knows no tokenizer, no model and no engine.

Field names follow OpenAI and vLLM. A field that is not honoured is an error that says so; a known field whose value
asks for nothing (`n: 1`, `echo: false`, ...) is accepted.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from ddtree.deployments.api.constraints import ConstraintFields
from ddtree.deployments.api.errors import BadRequest
from ddtree.deployments.api.strict import Strict
from ddtree.deployments.api.tools import ToolFields
from ddtree.deployments.requests import MAX_LOGIT_BIAS, MAX_LOGPROBS

MAX_STOP = 16
MAX_STOP_TOKENS = 128
INT64 = 2**63
R = TypeVar("R", bound=BaseModel)

# Known fields that are not honoured: the values that ask for nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "length_penalty": (None, 1),
    **dict.fromkeys(("metadata", "chat_template_kwargs"), (None, {})),
    **dict.fromkeys(("tools", "functions", "documents"), (None, [])),
    **dict.fromkeys(("bad_words", "logits_processors"), (None, [])),
    **dict.fromkeys(("echo", "use_beam_search"), (None, False)),
    **dict.fromkeys(("return_token_ids", "store"), (None, False)),
    **dict.fromkeys(("continue_final_message", "include_obfuscation"), (None, False)),
    **dict.fromkeys(("spaces_between_special_tokens", "add_generation_prompt"), (None, True)),
    **dict.fromkeys(("tool_choice", "function_call"), (None, "none", "auto")),
    **dict.fromkeys(("allowed_token_ids", "truncate_prompt_tokens", "chat_template"), (None,)),
    **dict.fromkeys(("reasoning_effort", "prediction", "audio", "verbosity", "web_search_options"), (None,)),
    **dict.fromkeys(("prompt_cache_key", "safety_identifier", "prompt_embeds", "cache_salt"), (None,)),
    **dict.fromkeys(("priority", "top_logprobs"), (None, 0)),
    "suffix": (None, ""),
    "service_tier": (None, "auto", "default"),
    "modalities": (None, ["text"]),
    "parallel_tool_calls": (None, True, False),  # of a completion, which has no tools
}
# What clients send back with an assistant's message that they received.
_NEUTRAL_IN_MESSAGE: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("name", "refusal", "audio", "function_call", "reasoning_content"), (None,)),
    "annotations": (None, []),
}


def _drop_neutral(data: Any, fields: dict[str, Any], neutral: dict[str, tuple[Any, ...]]) -> Any:
    """Remove the fields that ask for nothing; raise for those that ask for something."""
    if not isinstance(data, dict):
        return data
    for name, value in data.items():
        if name in fields or name not in neutral:
            continue
        if not any(value == v and isinstance(value, bool) == isinstance(v, bool) for v in neutral[name]):
            accepted = [json.dumps(v) for v in neutral[name] if v is not None]
            raise ValueError(f"is not supported; leave it out{f' or send {accepted[0]}' if accepted else ''}", name)
    return {name: value for name, value in data.items() if name in fields or name not in neutral}


class _Neutral(Strict):
    @model_validator(mode="before")
    @classmethod
    def _neutral(cls, data: Any) -> Any:
        return _drop_neutral(data, cls.model_fields, NEUTRAL)


SPECIAL_TOKENS = "by default a prompt gets those that the tokenizer adds, and messages those of the template alone"
StopString = Annotated[str, Field(min_length=1)]
StopStrings = Annotated[list[StopString], Field(max_length=MAX_STOP)]


class StreamOptions(_Neutral):
    include_usage: bool = False
    continuous_usage_stats: bool = Field(
        False, description="with `include_usage`: every chunk has the usage of its choice so far"
    )


class DDTreeOptions(Strict):
    """Our extension: how much to speculate, and whether to return the token ids."""

    budget: Annotated[int, Field(ge=0)] | Literal["auto"] | None = Field(
        None,
        description="draft nodes per round, up to the server's maximum; 0 is plain decoding, auto leaves it to the server",
    )
    return_token_ids: bool = Field(False, description="the `ddtree` object of the answer has the token ids")
    return_rounds: bool = Field(
        False, description="each chunk of a stream has its round: the draft tree as it was verified; with `stream` only"
    )
    prefix_cache: bool = Field(True, description="false computes the whole prompt, for measurements")


class GenerationFields(_Neutral, ConstraintFields):
    """What /v1/completions and /v1/chat/completions share. A field that is null is a field left out."""

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    n: int | None = Field(
        None, ge=1, description="choices for each prompt; choice i draws with `seed` + i. n × prompts is limited"
    )
    best_of: int | None = Field(None, description="only equal to `n`: all choices are returned")
    stop: StopStrings | None = None
    stop_token_ids: list[int] | None = Field(None, max_length=MAX_STOP_TOKENS)
    ignore_eos: bool | None = Field(None, description="the model's own stop tokens end nothing")
    include_stop_str_in_output: bool | None = Field(
        None, description="the text ends with what stopped it, not before it"
    )
    skip_special_tokens: bool | None = Field(None, description="false: special tokens show in the text")
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-INT64, lt=INT64)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)  # further out float32 has no room for the result
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(None, max_length=MAX_LOGIT_BIAS)
    min_tokens: int | None = Field(None, ge=0)
    prompt_logprobs: int | None = Field(
        None,
        ge=0,
        le=MAX_LOGPROBS,
        description="of each prompt token, and so many of the most probable ones; not in streams",
    )
    return_tokens_as_token_ids: bool | None = Field(
        None, description="log-probabilities name a token by its id, `token_id:42`"
    )
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    add_special_tokens: bool | None = Field(None, description=SPECIAL_TOKENS)
    user: str | None = Field(None, description="OpenAI's end-user label: changes nothing by definition")
    ddtree: DDTreeOptions | None = None

    @field_validator("stop", mode="before", json_schema_input_type=StopString | StopStrings | None)
    @classmethod
    def _one_stop(cls, stop: Any) -> Any:
        return [stop] if isinstance(stop, str) else stop

    @field_validator("logit_bias")
    @classmethod
    def _ids(cls, bias: dict[str, float] | None) -> dict[str, float] | None:
        for key in bias or ():
            if not re.fullmatch("0|-?[1-9][0-9]{0,17}", key):
                raise ValueError(f'has the key {key[:32]!r}; its keys are token ids, such as "42"')
        return bias

    @model_validator(mode="after")
    def _all_are_returned(self) -> Self:
        if self.best_of not in (None, self.choices):
            raise ValueError(f"must equal n, which is {self.choices}: all choices are returned", "best_of")
        return self

    @model_validator(mode="after")
    def _options_need_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("is only meaningful with stream: true", "stream_options")
        return self

    @model_validator(mode="after")
    def _rounds_need_stream(self) -> Self:
        if self.ddtree and self.ddtree.return_rounds and not self.stream:
            raise ValueError("needs stream: true, whose chunks the rounds come with", "ddtree.return_rounds")
        return self

    @model_validator(mode="after")
    def _prompt_logprobs_come_whole(self) -> Self:
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("is not supported with stream: true; leave one of them out", "prompt_logprobs")
        return self

    @property
    def choices(self) -> int:
        """Return how many sequences each prompt gets."""
        return self.n or 1

    @property
    def stops(self) -> tuple[str, ...]:
        return tuple(self.stop or ())


class CompletionRequest(GenerationFields):
    """POST /v1/completions. `prompt`: text, token ids, or a list of either."""

    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: int | None = Field(None, ge=0, description="0 only with `echo`")
    logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="of each token, and so many of the most probable ones"
    )
    echo: bool | None = Field(None, description="the answer begins with the prompt, its log-probabilities included")

    @field_validator("prompt", mode="before")
    @classmethod
    def _prompt(cls, prompt: Any) -> Any:
        def all_of(kind: type, values: Any) -> bool:
            return isinstance(values, list) and bool(values) and all(type(v) is kind for v in values)

        if isinstance(prompt, str) or all_of(str, prompt) or all_of(int, prompt):
            return prompt
        if all_of(list, prompt) and all(all_of(int, ids) for ids in prompt):
            return prompt
        raise ValueError("must be a string, a list of strings, a list of token ids or a list of such lists, not empty")

    @model_validator(mode="after")
    def _something_is_wanted(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("is 0: that leaves nothing to answer; ask for more, or send echo: true", "max_tokens")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """Return one entry per sequence to generate."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)


class TextPart(Strict):
    type: Literal["text"]
    text: str


class CalledFunction(Strict):
    name: str
    arguments: str  # a JSON object

    @field_validator("arguments")
    @classmethod
    def _object(cls, arguments: str) -> str:
        try:
            found = json.loads(arguments)
        except ValueError as error:
            raise ValueError(f"are not valid JSON: {error}") from None
        if not isinstance(found, dict):
            raise ValueError("must be a JSON object, written as a string")
        return arguments


class ToolCall(Strict):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        """With the arguments as an object."""
        function = {"name": self.function.name, "arguments": json.loads(self.function.arguments)}
        return {"id": self.id, "type": self.type, "function": function}


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None  # null where an assistant only calls tools
    tool_calls: list[ToolCall] | None = None  # an assistant's
    tool_call_id: str | None = None  # a tool's: which call it answers

    @model_validator(mode="before")
    @classmethod
    def _neutral(cls, data: Any) -> Any:
        return _drop_neutral(data, cls.model_fields, _NEUTRAL_IN_MESSAGE)

    @field_validator("content", mode="before")
    @classmethod
    def _content(cls, content: Any) -> Any:
        if not isinstance(content, str | list | None):
            raise ValueError("must be a string or a list of text parts")
        for part in content if isinstance(content, list) else ():
            if not isinstance(part, dict) or part.get("type") != "text":
                raise ValueError('has a part that is not {"type": "text", "text": ...}; only text is supported')
        return content

    @model_validator(mode="after")
    def _of_its_role(self) -> Self:
        if self.tool_calls and self.role != "assistant":
            raise ValueError("belong to a message of the assistant", "tool_calls")
        if (self.role == "tool") != (self.tool_call_id is not None):
            raise ValueError("comes with the role tool, and only with it", "tool_call_id")
        if self.content is None and not self.tool_calls:
            why = "must be a string or a list of text parts" if "content" in self.model_fields_set else "is required"
            raise ValueError(why, "content")
        return self

    def for_template(self) -> dict[str, Any]:
        """Return the message as chat templates read it; `developer` is OpenAI's newer name for `system`."""
        text = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content or ())
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": text}
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message


class Conversation(_Neutral):
    """Messages, and what the chat template is told of them."""

    messages: list[Message] = Field(min_length=1)
    add_generation_prompt: bool | None = Field(
        None, description="the head of an answer follows the messages; true by default"
    )
    continue_final_message: bool | None = Field(
        None, description="the last message is left open instead, and the answer goes on with it"
    )
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="variables of the model's own template")

    @model_validator(mode="after")
    def _one_end(self) -> Self:
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("and add_generation_prompt exclude each other", "continue_final_message")
        return self

    @property
    def opens_answer(self) -> bool:
        """Return whether the template is to add the head of an answer."""
        asked = self.add_generation_prompt
        return not self.continue_final_message if asked is None else asked


class ChatRequest(GenerationFields, Conversation, ToolFields):
    """POST /v1/chat/completions."""

    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = Field(None, description="of each token: the model's own, before temperature and penalties")
    top_logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="so many of the most probable tokens as well"
    )

    @model_validator(mode="after")
    def _one_limit(self) -> Self:
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError("and max_tokens are one limit, and their values differ", "max_completion_tokens")
        return self

    @model_validator(mode="after")
    def _top_of_what(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("needs logprobs: true", "top_logprobs")
        return self


class TokenizeText(_Neutral):
    """POST /tokenize with a prompt."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool = Field(True, description=SPECIAL_TOKENS)
    return_token_strs: bool | None = None


class TokenizeChat(Conversation):
    """POST /tokenize with messages."""

    model: str | None = None
    add_special_tokens: bool = Field(False, description=SPECIAL_TOKENS)
    return_token_strs: bool | None = None


class Detokenize(_Neutral):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]


def parse(kind: type[R], body: dict[str, Any]) -> R:
    """Return `body` as a request.

    Raises:
        BadRequest: names the first field that is wrong, and why.
    """
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise _explain(error) from None


def _explain(error: ValidationError) -> BadRequest:
    details = error.errors(include_url=False)
    first = next((d for d in details if d["type"] == "extra_forbidden"), details[0])
    named, begun = ("str", "constrained-int"), ("list[", "literal[")  # of unions
    tags = [part for part in first["loc"][1:] if part in named or str(part).startswith(begun)]
    loc = [*first["loc"][:1], *(part for part in first["loc"][1:] if part not in tags)]
    reason = first["msg"]
    if first["type"] == "value_error":
        cause = first["ctx"]["error"].args
        reason, loc = cause[0], [*loc, *cause[1:]]
    elif first["type"] == "extra_forbidden":
        reason = "is not a field of this API"
    elif first["type"] == "missing":
        reason = "is required"
    elif first["type"] == "model_type":
        reason = "must be a JSON object"
    else:
        reason = f"is wrong: {reason[0].lower()}{reason[1:]}"
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).removeprefix(".")
    return BadRequest(f"'{param}' {reason}.", param or None)
