"""The Serve application: what `serve run configs/NAME.yaml` imports, and the same with its checks before (`ddtree serve`)."""

from __future__ import annotations

from typing import Any

from ray.serve import Application

from ddtree.deployments import models
from ddtree.deployments.api.checks import check
from ddtree.deployments.config import AppConfig
from ddtree.deployments.drafter_deployment import Drafter
from ddtree.deployments.ingress import Ingress
from ddtree.deployments.router_deployment import Router, routing
from ddtree.deployments.verifier_deployment import Verifier, placement


def build_app(args: dict[str, Any]) -> Application:
    """Application builder for Serve. `args` is an AppConfig as a mapping. Raises ConfigError before anything loads."""
    config = AppConfig.parse(args, "args")
    check(config.api)
    found = models.find(config)
    verifier = bind(Verifier, config, found, **placement(config))
    router = bind(Router, config, found, verifier, **routing(config))
    drafters = [bind(Drafter, config, found, router)] if found.drafter else []
    return bind(Ingress, config, found, router, *drafters, graceful_shutdown_timeout_s=config.api.drain_s)


def bind(deployment: Any, *args: Any, **options: Any) -> Application:
    """`deployment.options(**options).bind(*args)`, typed: Serve's decorators hide what they return."""
    application: Application = deployment.options(**options).bind(*args)
    return application
