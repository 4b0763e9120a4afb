"""The Serve application: what `serve run configs/NAME.yaml` imports, and the same with its checks before (`ddtree serve`)."""

from __future__ import annotations

from typing import Any

from ray.serve import Application

from ddtree.deployments import models
from ddtree.deployments.config import AppConfig
from ddtree.deployments.drafter_deployment import Drafter
from ddtree.deployments.ingress import Ingress
from ddtree.deployments.router_deployment import Router
from ddtree.deployments.verifier_deployment import Verifier


def build_app(args: dict[str, Any]) -> Application:
    """Application builder for Serve. `args` is an AppConfig as a mapping. Raises ConfigError before anything loads."""
    config = AppConfig.parse(args, "args")
    found = models.find(config)
    verifier = Verifier.bind(config, found)
    router = Router.bind(config, found, verifier)
    if not found.drafter:
        return Ingress.bind(config, found, router)
    return Ingress.bind(config, found, router, Drafter.bind(config, found, router))
