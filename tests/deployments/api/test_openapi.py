"""/openapi.json: bodies and answers are described, and what is described is what is read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from ddtree.deployments.api.app import ApiSettings, create_app
from ddtree.deployments.api.openapi import REQUESTS
from ddtree.verifier.byte_tokenizer import byte_tokenizer

from .served import CONTEXT, EOS, MODEL, VOCABULARY, LocalEngine


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> TestClient:
    settings = ApiSettings(MODEL, CONTEXT, VOCABULARY, (EOS,), default_budget=0, max_budget=16)
    folder: Path = tmp_path_factory.mktemp("target")
    return TestClient(create_app(settings, LocalEngine(folder), byte_tokenizer(VOCABULARY)))


@pytest.fixture(scope="module")
def document(client: TestClient) -> dict[str, Any]:
    found: dict[str, Any] = client.get("/openapi.json").json()
    return found


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from [value["$ref"]] if "$ref" in value else []
        for part in value.values():
            yield from references(part)
    elif isinstance(value, list):
        for part in value:
            yield from references(part)


def test_every_reference_leads_somewhere(document: dict[str, Any]) -> None:
    known = {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
    assert set(references(document)) <= known


def test_bodies_are_the_models_that_read_them(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    for kind in REQUESTS:
        assert set(schemas[kind.__name__]["properties"]) == set(kind.model_fields)
        assert schemas[kind.__name__]["additionalProperties"] is False
    for path, kinds in {
        "/v1/completions": ["CompletionRequest"],
        "/v1/chat/completions": ["ChatRequest"],
        "/tokenize": ["TokenizeText", "TokenizeChat"],
        "/detokenize": ["Detokenize"],
    }.items():
        body = document["paths"][path]["post"]["requestBody"]
        assert [ref.rsplit("/")[-1] for ref in references(body)] == kinds
        assert {"200", "400", "429", "503"} <= set(document["paths"][path]["post"]["responses"])


def test_a_wrong_method_is_told_the_right_ones(client: TestClient) -> None:
    answer = client.get("/v1/completions")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
