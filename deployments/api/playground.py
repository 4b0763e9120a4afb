"""The page at `/`: files that `deployments/playground` was built into, which ask only this server. Knows HTTP alone."""

from __future__ import annotations

from hashlib import sha256
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request, Response

FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/playground.js": ("playground.js", "text/javascript; charset=utf-8"),
    "/playground.css": ("playground.css", "text/css; charset=utf-8"),
}
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # asked for again each time, by its ETag
}


def add_playground(app: FastAPI) -> None:
    """Serve the page and what belongs to it."""
    folder = files("ddtree.deployments") / "playground/built"
    for path, (name, kind) in FILES.items():
        content = (folder / name).read_bytes()
        app.add_api_route(path, _serving(content, kind), methods=["GET", "HEAD"], include_in_schema=False)


def _serving(content: bytes, kind: str) -> Any:
    headers = HEADERS | {"ETag": f'"{sha256(content).hexdigest()[:32]}"'}

    async def serve(request: Request) -> Response:
        if request.headers.get("if-none-match") == headers["ETag"]:
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=kind, headers=headers)

    return serve
