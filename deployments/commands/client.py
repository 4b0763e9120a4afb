"""The command line's own client of a running server's chat endpoint. Knows HTTP; knows no engine and no terminal."""

from __future__ import annotations

import json
import os
from collections.abc import Generator
from typing import Any

import httpx

from ddtree.deployments.requests import Budget

CHAT = "/v1/chat/completions"
KEY = "DDTREE_API_KEY"  # an environment variable and no option: `ddtree bench` writes its command line into its result
TIMEOUT = httpx.Timeout(10.0, read=600.0)  # an answer may wait in a queue and then take minutes on a small machine


class ServerError(RuntimeError):
    """The server refused a request or is not there; the message says which."""


def chat_body(
    messages: list[dict[str, str]], *, budget: Budget | None, prefix_cache: bool = True, **fields: Any
) -> dict[str, Any]:
    """Return a chat request that asks for our figures and the token ids. `budget` None is the server's default."""
    extension: dict[str, Any] = {"return_token_ids": True, "prefix_cache": prefix_cache}
    extension |= {} if budget is None else {"budget": budget}
    return {"messages": messages, "ddtree": extension} | {k: v for k, v in fields.items() if v is not None}


async def post_chat(client: httpx.AsyncClient, body: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the answer to a request that does not stream and is called `name`. Raises ServerError."""
    try:
        response = await client.post(CHAT, json=body, headers={"x-request-id": name})
    except httpx.HTTPError as error:
        raise _unreachable(client.base_url, error) from error
    return _checked(response)


def stream_chat(client: httpx.Client, body: dict[str, Any]) -> Generator[dict[str, Any], None, None]:
    """Yield the chunks of a streaming answer. Closing the generator cancels the request. Raises ServerError."""
    try:
        with client.stream("POST", CHAT, json=body | {"stream": True}) as response:
            if response.status_code != 200:
                response.read()
                _checked(response)
            for line in response.iter_lines():
                data = line.removeprefix("data: ")
                if data == line or data == "[DONE]":
                    continue
                chunk: dict[str, Any] = json.loads(data)
                if "error" in chunk:
                    raise ServerError(chunk["error"]["message"])
                yield chunk
    except httpx.HTTPError as error:
        raise _unreachable(client.base_url, error) from error


def settings(url: str) -> dict[str, Any]:
    """Return how an httpx client asks the server at `url`: with the API key of the environment, if there is one."""
    headers = {"Authorization": f"Bearer {os.environ[KEY]}"} if os.environ.get(KEY) else {}
    return {"base_url": url, "timeout": TIMEOUT, "headers": headers}


def get_json(client: httpx.Client, path: str) -> dict[str, Any]:
    """Return what a GET of the server gives. Raises ServerError."""
    try:
        return _checked(client.get(path))
    except httpx.HTTPError as error:
        raise _unreachable(client.base_url, error) from error


def _checked(response: httpx.Response) -> dict[str, Any]:
    try:
        answer: dict[str, Any] = response.json()
        if response.status_code == 200:
            return answer
        message = answer["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = response.text[:200]
    raise ServerError(f"the server answered {response.status_code}: {message}")


def _unreachable(url: httpx.URL, error: Exception) -> ServerError:
    reason = str(error) or type(error).__name__
    return ServerError(f"no answer from {url} ({reason}); start a server with `ddtree serve configs/smollm2-cpu.yaml`")
