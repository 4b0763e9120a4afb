"""What the `api` section of a configuration names, checked before anything starts. Imports no more than that needs."""

from __future__ import annotations

from importlib.util import find_spec

from ddtree.deployments.api.keys import read_keys
from ddtree.deployments.config import ApiConfig
from ddtree.deployments.errors import ConfigError


def check(config: ApiConfig) -> None:
    """Raises ConfigError where the section names what is not here."""
    if config.keys_file:
        read_keys(config.keys_file)
    if config.otlp_endpoint and not _is_there("opentelemetry.exporter.otlp.proto.http"):
        raise ConfigError("api.otlp_endpoint needs OpenTelemetry's exporter: pip install 'ddtree-serve[otel]'")


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # a package above it is not there
        return False
