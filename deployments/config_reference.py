"""The tables of keys in docs/configuration.md, made from the configuration's models.

python -m ddtree.deployments.config_reference docs/configuration.md     # writes them into the file, between its marks
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

from ddtree.deployments.config import AppConfig, Section
from ddtree.deployments.fields import placed, rows


def written(document: str) -> str:
    """Return the document with its tables as they are now. Raises ValueError where it has no marks for them."""
    return placed(document, "deployments/config_reference.py", tables())


def tables() -> str:
    """Return a table for every key at the top of `args`, under what its model says of itself."""
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    keys = dict(rows(AppConfig))
    for name, field in AppConfig.model_fields.items():
        kind = field.annotation
        section = isinstance(kind, type) and issubclass(kind, Section)
        yield from ("", f"### {name}", "")
        if section:
            yield from (inspect.getdoc(kind) or "", "")
        yield from ("| key | values | default | |", "|---|---|---|---|")
        for key, row in keys.items():
            if key.startswith(f"{name}.") or (key == name and not section):
                yield f"| `{key}` | {row.values} | {row.default} | {row.meaning} |"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(written(path.read_text("utf-8")), "utf-8")
