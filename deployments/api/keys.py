"""API keys: who may ask. Knows HTTP headers and the file that keys come from; knows no request.

Keys come from a file, a line each, never from the configuration: Serve stores that, and shows it in its dashboard and in
`serve config`. A variable would reach an ingress on another node through a `runtime_env` alone, which is shown there too.
Here only their digests are kept.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from ddtree.deployments.api.errors import ApiError
from ddtree.deployments.api.playground import FILES
from ddtree.deployments.errors import ConfigError

OPEN = frozenset(
    {"/health", "/metrics", "/version", "/openapi.json", "/docs", "/redoc", *FILES}
)  # nothing of a user's in them


def read_keys(path: str) -> tuple[bytes, ...]:
    """Return the digest of each key in a file: a line each; empty lines and those that begin with # say nothing.

    Raises:
        ConfigError: there is no such file, or no key in it, or one that no header can carry.
    """
    try:
        lines = [line.strip() for line in Path(path).expanduser().read_text("utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"api.keys_file: cannot read {path} ({error}); it holds one API key a line") from None
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ConfigError(f"api.keys_file: {path} holds no key; write one a line, or leave api.keys_file out")
    if any(not key.isascii() or not key.isprintable() or " " in key for key in keys):
        raise ConfigError(f"api.keys_file: a key in {path} is not made of printable ASCII characters without spaces")
    return tuple(sha256(key.encode()).digest() for key in keys)


class RequireKey:
    """ASGI middleware that answers 401 to requests without one of the keys, except for the paths that are open."""

    def __init__(self, app: ASGIApp, digests: Sequence[bytes]) -> None:
        self._app, self._digests = app, digests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _path(scope) in OPEN or self._may(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        error = ApiError(401, "This server needs a valid API key: Authorization: Bearer KEY.", code="invalid_api_key")
        await error.response()(scope, receive, send)

    def _may(self, headers: Headers) -> bool:
        """Whether there is a right key. Takes as long for one that is nearly right as for any other."""
        scheme, _, key = headers.get("authorization", "").partition(" ")
        digest = sha256(key.strip().encode()).digest()
        known = [hmac.compare_digest(digest, own) for own in self._digests]
        return scheme.lower() == "bearer" and any(known)


def _path(scope: Scope) -> str:
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))
