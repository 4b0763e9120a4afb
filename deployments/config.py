"""The deployment configuration: the only source of defaults. Unknown keys are errors. Knows no Ray and loads no model.

`AppConfig` is the `args` section of an application in a Serve config file. `AppConfig.parse` turns what pydantic says into
one sentence. What parses can be planned (`ddtree plan`); whether it can be served here and now is for `models.find` to say.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from ddtree.deployments.errors import ConfigError
from ddtree.deployments.requests import Budget

# The router's share of the verifier's first GPU. Ray shows an actor only GPUs that it has a share of, and puts a share on the
# fullest GPU that still has room for it, which is the one that verifier and drafters share.
ROUTER_GPUS = 0.01
AUTO = 0  # `kv_tokens: auto` as a number, so that everybody else reads an int

Device = Literal["cpu", "cuda"]
Weights = Literal["checkpoint", "random"]
Tokens = Annotated[
    int,
    BeforeValidator(
        lambda given: AUTO if given == "auto" else given,
        json_schema_input_type=Annotated[int, Field(ge=0)] | Literal["auto"],
    ),
    Field(ge=0),
]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TargetConfig(Section):
    """The model whose output is served."""

    model: str = Field(description="An embedded model's name or a directory in Hugging Face form.")
    weights: Weights = Field("checkpoint", description="random: made on the spot from the shape alone, for tests.")
    served_name: str | None = Field(
        None, description="Name in the API; the directory's or embedded model's by default."
    )
    dtype: Literal["auto", "bfloat16", "float32"] = Field("auto", description="auto: bfloat16 where the device has it.")
    max_context: int | None = Field(
        None, ge=2, description="Prompt + answer in tokens; the model's own limit by default."
    )

    @property
    def key(self) -> str:
        """Two targets with the same key give a request the same tokens."""
        return self.model_dump_json()


class VerifierConfig(Section):
    """How the target runs."""

    backend: str = Field(
        "hf", description="hf: transformers, on one device. vllm: vLLM as a library, of any number of ranks."
    )
    device: Device = Field("cpu", description="Where all ranks run.")
    tensor_parallel_size: int = Field(
        1, ge=1, description="Ranks the target is split over, one GPU each with device cuda; backend hf has one."
    )
    threads: int = Field(
        2, ge=1, description="torch threads of a rank on a CPU; more than there are cores collapses speed."
    )
    batch_invariant: bool = Field(
        False,
        description="On a CPU, with backend hf: what a row computes does not depend on the rows beside it. In bfloat16, too, "
        "speculative output is then plain output to the token, whatever the tree and the company. Steps take longer, the more "
        "the longer the context.",
    )
    page_size: int = Field(16, ge=1, description="KV rows a page.")
    kv_tokens: Tokens = Field(
        32768,
        description="KV rows in the pool, shared by all sequences. auto, or 0: what the GPUs' memory leaves; not on a CPU.",
    )
    prefix_cache: bool = Field(True, description="Keep complete pages for prompts that begin the same way.")
    gpu_memory_fraction: float = Field(
        0.9, gt=0, le=1, description="Part of each GPU's memory that this deployment may fill."
    )
    timeout_s: float = Field(120, gt=0, description="A verify step that takes longer counts as a lost verifier.")

    @model_validator(mode="after")
    def _possible(self) -> VerifierConfig:
        if self.kv_tokens == AUTO and self.device == "cpu":
            raise ValueError("verifier.kv_tokens auto is sized from GPU memory; on a cpu give a number")
        if self.tensor_parallel_size > 1 and self.backend == "hf":
            raise ValueError("verifier.backend hf runs on one device; tensor_parallel_size above 1 needs backend vllm")
        if self.batch_invariant and (self.backend, self.device) != ("hf", "cpu"):
            raise ValueError(
                "verifier.batch_invariant is for backend hf on device cpu; leave it out, or compute in float32"
            )
        return self


class SyntheticConfig(Section):
    """For benchmarks only: drafts replay recorded output of the target, right as often as asked (drafter/synthetic.py)."""

    record: str = Field(description="Recordings of plain decoding, as `ddtree bench --record` writes them.")
    acceptance: tuple[Annotated[float, Field(ge=0, le=1)], ...] | None = Field(
        None, description="Probability, by depth, that a token is right where all before it were."
    )
    acceptance_length: float | None = Field(
        None, ge=1, description="Instead: tokens gained a round; one probability for all depths gives it."
    )

    @model_validator(mode="after")
    def _one(self) -> SyntheticConfig:
        if (self.acceptance is None) == (self.acceptance_length is None):
            raise ValueError("drafter.synthetic takes one of acceptance and acceptance_length")
        return self


class DrafterConfig(Section):
    """How drafts are made."""

    checkpoint: str | None = Field(
        "smollm2-135m", description="A shipped checkpoint's name or a directory. null serves plain decoding only."
    )
    weights: Weights = Field("checkpoint", description="random: made on the spot from the shape alone, for tests.")
    device: Device = Field("cpu", description="Where every drafter runs.")
    num_gpus: float = Field(
        0,
        ge=0,
        le=1,
        description="Of each drafter, with device cuda alone: below 1 a share of the verifier's first GPU, 1 a GPU of its own.",
    )
    dtype: Literal["auto", "bfloat16", "float32"] = Field("auto", description="auto: bfloat16 where the device has it.")
    threads: int = Field(2, ge=1, description="torch threads of a drafter on a CPU.")
    timeout_s: float = Field(
        5, gt=0, description="A draft that takes longer is done without, and its drafter forgotten."
    )
    rebuild_window: int = Field(
        128, ge=1, description="Tokens re-run through the target to give a new drafter its context."
    )
    path_head: bool = Field(
        True,
        description="Draft by the checkpoint's path head, where it has one: trees whose scores depend on the path.",
    )
    synthetic: SyntheticConfig | None = Field(
        None, description="For benchmarks only: drafts replay recorded output of the target, right as often as asked."
    )

    @model_validator(mode="after")
    def _placed(self) -> DrafterConfig:
        if self.synthetic and self.checkpoint is None:
            raise ValueError("drafter.synthetic needs a drafter.checkpoint, which runs for its cost")
        if 1 - ROUTER_GPUS <= self.num_gpus < 1:
            raise ValueError(
                f"drafter.num_gpus ({self.num_gpus}) leaves nothing of the GPU to the verifier; give less, or 1"
            )
        if (self.device == "cuda") != (self.num_gpus > 0):
            raise ValueError(
                "drafter.num_gpus must be above 0 with drafter.device cuda, and is for cuda alone: below 1 a share of "
                "the verifier's first GPU, 1 a GPU of its own"
            )
        return self


class TreeConfig(Section):
    """The draft tree."""

    budget: Budget = Field(
        "auto",
        description="Nodes besides the root, per sequence and round, from 0 to max_budget; a request may ask for its own. "
        "auto: as many as pay, by what drafts and steps cost on this machine and how often such nodes were accepted, and none "
        "where drafts do not pay.",
    )
    max_budget: int = Field(63, ge=0, le=1023, description="The most that a tree may have.")
    top_k: int = Field(32, ge=1, le=128, description="Candidates per depth.")
    shared_noise: bool = Field(
        True, description="Rank candidates by the draw that is to come, where the temperature is above 0."
    )

    @field_validator("budget", mode="before")
    @classmethod
    def _nodes(cls, given: Any) -> Any:
        if given == "auto" or (type(given) is int and given >= 0):
            return given
        raise ValueError(f"'tree.budget' = {given!r}: give a number of nodes from 0 on, or auto")

    @model_validator(mode="after")
    def _within(self) -> TreeConfig:
        if self.budget != "auto" and self.budget > self.max_budget:
            raise ValueError(f"tree.budget ({self.budget}) is above tree.max_budget ({self.max_budget})")
        return self


class SchedulerConfig(Section):
    """Continuous batching."""

    max_sequences: int = Field(16, ge=1, description="Sequences that run at once; others wait.")
    max_waiting: int = Field(256, ge=1, description="Requests that may wait; one more is refused.")
    prefill_rows: int = Field(256, ge=1, description="Prompt tokens a step may carry beside the trees.")
    overlap: Literal["auto", "on", "off"] = Field(
        "auto",
        description="Draft for one half of the batch while the other half is verified. auto: try both ways now and then, "
        "and take the faster one.",
    )
    stuck_s: float = Field(180, gt=0, description="A round that takes longer makes the router unhealthy.")


class ApiConfig(Section):
    """The HTTP edge."""

    max_body_bytes: int = Field(4 << 20, ge=1024, description="A larger body of a request is refused with 413.")
    keys_file: str | None = Field(
        None,
        description="File with the API keys that may ask, a line each, on every node with an ingress; read when one starts. "
        "Not the keys themselves: Serve stores and shows the configuration.",
    )
    default_max_tokens: int = Field(
        16, ge=1, description="max_tokens of a completion that names none, as OpenAI has it."
    )
    per_request_spec_decode_metrics: Literal["none", "summary"] = Field(
        "none",
        description="summary: answers have `metrics.speculative_decoding`, as vLLM gives it with the option of this name. The "
        "`ddtree` object, which a request asks for, says more.",
    )
    otlp_endpoint: str | None = Field(
        None,
        pattern="^https?://",
        description="Where spans of requests are posted with OTLP over HTTP, such as http://localhost:4318/v1/traces. Needs the "
        "extra `otel`.",
    )
    request_log: bool = Field(
        False, description="Write a line of JSON for every finished request to the ingress's stdout."
    )
    request_timeout_s: float | None = Field(
        None, gt=0, description="A request that is not answered to its end by then is ended with 408. Off by default."
    )
    max_choices: int = Field(128, ge=1, description="Answers that one request may ask for: prompts × n.")
    resubmit_s: float = Field(
        600, gt=0, description="So long a request waits for a router: for its first, and for another when it died."
    )
    verifier_wait_s: float = Field(
        600,
        gt=0,
        description="So long requests wait while their verifier is replaced. Then all of them end with 503, and new ones "
        "are refused, until there is one.",
    )
    drain_s: float = Field(
        600, gt=0, description="So long an ingress that leaves, or is replaced, goes on with the requests it has."
    )


class HardwareConfig(Section):
    """What the deployment is meant for. `ddtree plan` sizes for it; nothing else reads it."""

    gpu: Literal["H100", "H200", "B200"] | None = Field(None, description="Kind of every GPU; none on a CPU.")
    gpus: int = Field(0, ge=0, description="GPUs of the one host; no fewer than verifier and drafter take.")


class AppConfig(Section):
    """One deployment: the `args` of the application in a Serve config file."""

    target: TargetConfig
    verifier: VerifierConfig = VerifierConfig()
    drafter: DrafterConfig = DrafterConfig()
    tree: TreeConfig = TreeConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    api: ApiConfig = ApiConfig()
    hardware: HardwareConfig = HardwareConfig()
    transport: Literal["auto", "mailbox", "objects"] = Field(
        "auto",
        description="How tensors pass between actors: mailbox maps memory of one node, objects works across nodes. auto: "
        "mailbox where router and verifier are on one node.",
    )

    @property
    def gpus_needed(self) -> int:
        """GPUs that verifier and drafter take together."""
        verifier = self.verifier.tensor_parallel_size if self.verifier.device == "cuda" else 0
        shared = verifier and self.drafter.num_gpus < 1
        drafts = self.drafter.checkpoint is not None and self.drafter.device == "cuda"
        return verifier + (1 if drafts and not shared else 0)

    @model_validator(mode="after")
    def _enough(self) -> AppConfig:
        if self.hardware.gpu and self.hardware.gpus < self.gpus_needed:
            raise ValueError(
                f"hardware.gpus ({self.hardware.gpus}) is below the {self.gpus_needed} that verifier and drafter take"
            )
        return self

    def default_budget(self, user_config: Any) -> Budget:
        """Of a request that names none: what `user_config` of the Ingress says, else tree.budget. Raises ConfigError."""
        given, source = user_config or {}, "user_config of Ingress"
        if not isinstance(given, dict):
            raise ConfigError(f"{source} must be a mapping such as {{budget: 16}}, not {given!r}")
        if unknown := sorted(given.keys() - {"budget"}):
            raise ConfigError(f"{source}: unknown key '{unknown[0]}'; valid is budget")
        changed = self.model_dump() | {"tree": self.tree.model_dump() | given}
        return AppConfig.parse(changed, source).tree.budget

    @classmethod
    def parse(cls, args: Any, source: str = "config") -> AppConfig:
        """Validate a mapping. Raises ConfigError with one sentence per fault, the first few."""
        try:
            return cls.model_validate(args or {})
        except ValidationError as error:
            raise ConfigError(f"{source}: {_sentence(error)}") from None


def load(path: Path) -> AppConfig:
    """The configuration of the only application of a Serve config file. Raises ConfigError."""
    return AppConfig.parse(read_document(path)["applications"][0].get("args"), str(path))


def read_document(path: Path) -> dict[str, Any]:
    """A Serve config file with exactly one application, as a mapping. Raises ConfigError."""
    import yaml

    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}; give a Serve config file such as configs/smollm2-cpu.yaml"
        ) from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {str(error).splitlines()[0]}") from None
    applications = document.get("applications") if isinstance(document, dict) else None
    if not isinstance(applications, list) or len(applications) != 1 or not isinstance(applications[0], dict):
        raise ConfigError(f"{path}: 'applications' must list exactly one application")
    found: dict[str, Any] = document
    return found


def _sentence(error: ValidationError) -> str:
    faults = []
    for fault in error.errors()[:3]:
        where = ".".join(str(part) for part in fault["loc"])
        if fault["type"] == "extra_forbidden":
            faults.append(f"unknown key '{where}'; valid beside it are {', '.join(_siblings(fault['loc']))}")
        elif fault["type"] == "missing":
            faults.append(f"'{where}' is missing")
        elif fault["type"] == "value_error":
            faults.append(str(fault["ctx"]["error"]))
        else:
            faults.append(f"'{where}' = {fault['input']!r}: {fault['msg'][:1].lower()}{fault['msg'][1:]}")
    return "; ".join(faults)


def _siblings(location: tuple[Any, ...]) -> list[str]:
    model: Any = AppConfig
    for part in location[:-1]:
        annotation = model.model_fields[part].annotation
        model = next((kind for kind in get_args(annotation) if hasattr(kind, "model_fields")), annotation)
    return sorted(model.model_fields)
