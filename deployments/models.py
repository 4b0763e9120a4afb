"""Which target and which drafter a configuration means, checked against each other from their JSON files alone.

Imports no torch and reads no weights, so that a bad configuration stops within a second. Knows no Ray.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ddtree.deployments.config import AUTO, AppConfig
from ddtree.deployments.errors import ConfigError
from ddtree.drafter.config import DrafterInfo
from ddtree.verifier.backends import check_backend
from ddtree.verifier.model_dir import TargetInfo, resolve


@dataclass(frozen=True)
class Models:
    """What a deployment loads. Written here, read by every actor."""

    target: TargetInfo
    served_name: str
    max_context: int  # prompt + answer, tokens
    drafter: DrafterInfo | None
    drafter_dir: Path | None

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return tuple(self.drafter.target_layer_ids) if self.drafter else ()

    @property
    def horizon(self) -> int:
        """Deepest node of a tree."""
        return self.drafter.horizon if self.drafter else 0


def shipped_checkpoints() -> Path:
    """The folder of the checkpoints inside the package."""
    import ddtree.drafter

    return Path(ddtree.drafter.__file__).parent / "checkpoints"


def find(config: AppConfig, progress: Callable[[str, int, int], None] | None = None) -> Models:
    """Resolve and check everything that a deployment names. Raises ConfigError. Prepares an embedded target on first use."""
    _check_servable(config)
    drafter_dir = _checkpoint(config.drafter.checkpoint)
    try:
        check_backend(config.verifier.backend)
        drafter = DrafterInfo.read(drafter_dir) if drafter_dir else None
        target = TargetInfo.read(resolve(config.target.model, progress))
        check_backend(config.verifier.backend, target.model_type)
        if drafter:
            drafter.check_target(target.hidden_size, target.vocab_size, target.num_layers, target.name)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    max_context = min(config.target.max_context or target.max_positions, target.max_positions)
    rows, page_size = max_context + config.tree.max_budget + 1, config.verifier.page_size
    need = (-(-rows // page_size) + 1) * page_size  # one page is scratch
    if config.verifier.kv_tokens < need:
        raise ConfigError(
            f"verifier.kv_tokens ({config.verifier.kv_tokens}) must hold one sequence of full length: at least {need} "
            f"(context {max_context} + tree.max_budget + 1, in pages, and one more); raise it or lower target.max_context"
        )
    return Models(target, config.target.served_name or target.name, max_context, drafter, drafter_dir)


def _check_servable(config: AppConfig) -> None:
    """What can be written down and planned, but not run yet. A line goes when its part is built."""
    verifier, drafter = config.verifier, config.drafter
    not_yet = (
        ("verifier.device 'cuda'", verifier.device == "cuda"),
        ("drafter.device 'cuda'", drafter.device == "cuda"),
        (f"verifier.tensor_parallel_size {verifier.tensor_parallel_size}", verifier.tensor_parallel_size > 1),
        ("verifier.kv_tokens auto", verifier.kv_tokens == AUTO),
        ("target.weights 'random'", config.target.weights == "random"),
        ("drafter.weights 'random'", drafter.weights == "random"),
    )
    for what, asked in not_yet:
        if asked:
            raise ConfigError(f"{what} cannot be served yet; `ddtree plan` says what it will need")


def _checkpoint(name: str | None) -> Path | None:
    if name is None:
        return None
    shipped = shipped_checkpoints()
    for path in (shipped / name, Path(name).expanduser()):
        if (path / "config.json").is_file():
            return path.resolve()
    names = sorted(p.parent.name for p in shipped.glob("*/config.json"))
    raise ConfigError(
        f"drafter.checkpoint '{name}' is neither a shipped checkpoint ({', '.join(names) or 'none'}) "
        "nor a directory with a config.json"
    )
