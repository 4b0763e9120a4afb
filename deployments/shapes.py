"""Where the sizes of a model are read: its own config.json where it is on this machine, else configs/shapes. Reads JSON only."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from ddtree.deployments.errors import ConfigError


def shipped_checkpoints() -> Path:
    """The folder of the checkpoints inside the package."""
    import ddtree.drafter

    return Path(ddtree.drafter.__file__).parent / "checkpoints"


def facts(model: str, what: str, remedy: str, given: Path | None = None) -> tuple[Mapping[str, Any], str]:
    """The config.json of a model and where it was: `given`, the model's directory, a shipped drafter, configs/shapes.

    `what` is the target or the drafter. Raises ConfigError, with the remedy, where there is none.
    """
    shapes = Path(str(files("ddtree.configs") / "shapes"))
    shipped = shapes / f"{Path(model).name.lower()}.json"
    places = (Path(model).expanduser() / "config.json", shipped_checkpoints() / model / "config.json", shipped)
    path = given or next((place for place in places if place.is_file()), None)
    if path is None:
        known = ", ".join(sorted(shape.stem for shape in shapes.glob("*.json")))
        raise ConfigError(
            f"the {what} '{model}' is not on this machine and its sizes are not shipped (known: {known}); {remedy}"
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; a {what} has its sizes in a config.json") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a JSON object: a model's config.json")
    return content, f"configs/shapes/{path.name}" if path == shipped else str(path)
