"""Ingress: the HTTP edge as a Serve deployment. Holds the tokenizer and the API app, no state of a request beyond its stream.

One that is replaced finishes its streams (api.drain_s) while the new one, which was ready before, takes what comes.

The app itself is in api/app.py and knows no Ray; here it is given its engine, a client of the Router deployment.
"""

from __future__ import annotations

import logging
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle

from ddtree.deployments.api.app import ApiSettings, create_app
from ddtree.deployments.api.keys import read_keys
from ddtree.deployments.config import AppConfig
from ddtree.deployments.errors import ConfigError
from ddtree.deployments.models import Models
from ddtree.deployments.router_client import RouterEngine

log = logging.getLogger("ray.serve")


@serve.deployment(
    name="Ingress",
    ray_actor_options={"num_cpus": 0},
    max_ongoing_requests=1000,
    max_surge_percent=100,
    graceful_shutdown_wait_loop_s=0.5,
)
@serve.ingress()  # the replica builds the app, once it has its tokenizer
class Ingress:
    def __init__(self, config: AppConfig, models: Models, router: DeploymentHandle, *_: Any) -> None:
        from transformers import AutoTokenizer

        self._config = config
        self._tokenizer = AutoTokenizer.from_pretrained(models.target.model_dir)
        self._engine = RouterEngine(router, config.api.resubmit_s, config.target.key)
        self._settings = ApiSettings(
            model=models.served_name,
            context_length=models.max_context,
            vocab_size=models.target.vocab_size,
            eos_token_ids=models.target.eos_token_ids,
            default_budget=config.tree.budget if models.drafter else 0,
            max_budget=config.tree.max_budget if models.drafter else 0,
            max_body_bytes=config.api.max_body_bytes,
            max_choices=config.api.max_choices,
            default_max_tokens=config.api.default_max_tokens,
            metrics_horizon=models.horizon if config.api.per_request_spec_decode_metrics == "summary" else None,
            otlp_endpoint=config.api.otlp_endpoint,
            request_timeout_s=config.api.request_timeout_s,
            request_log=config.api.request_log,
            keys=read_keys(config.api.keys_file) if config.api.keys_file else (),
        )

    def __serve_build_asgi_app__(self) -> Any:
        return create_app(self._settings, self._engine, self._tokenizer)

    def reconfigure(self, user_config: Any, rank: Any) -> None:
        """Called by Serve at the start and when a deploy changes `user_config`: `{budget: N}` goes before tree.budget, from the
        next request on. One that makes no sense is left alone, because Serve would take the service down for it. (Serve tells
        of one that was removed only who takes a rank.)"""
        try:
            budget = self._config.default_budget(user_config)
        except ConfigError as error:
            log.error("%s; the budget stays %s", error, self._settings.default_budget)
        else:
            self._settings.default_budget = budget if self._settings.max_budget else 0
