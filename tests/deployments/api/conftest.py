"""What the tests of the API share: the real client of the running deployment, and its model's tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest


@pytest.fixture(scope="module")
def client(server: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0, timeout=120)


@pytest.fixture(scope="module")
def tokenizer(target_dir: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(target_dir)
