"""A deployment on paper: sizes against published and hand-computed numbers, and laws that any plan must obey."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from ddtree.deployments.commands.main import app
from ddtree.deployments.commands.plan import PlanOptions, make_plan
from ddtree.deployments.config import HardwareConfig, load
from ddtree.deployments.gpus import GPUS
from ddtree.deployments.roofline import Roofline
from ddtree.deployments.target_shape import TargetShape
from ddtree.drafter.config import path_head_size

REPOSITORY = Path(__file__).parents[2]
CONFIGS = sorted((REPOSITORY / "configs").glob("*.yaml"))
SHAPES = REPOSITORY / "configs/shapes"
GIB = 2**30
KIMI, QWEN = REPOSITORY / "configs/kimi-k2.6-8gpu.yaml", REPOSITORY / "configs/qwen3-8b-1gpu.yaml"


def facts(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((SHAPES / f"{name}.json").read_text())
    return content


def shape(name: str) -> TargetShape:
    return TargetShape.from_config(facts(name), name)


def ddtree(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["plan", *arguments], env={"COLUMNS": "200"})
    return done.exit_code, done.output


def edited(folder: Path, source: Path, **changes: Any) -> Path:
    """A copy of a configuration with `section__key=value` changed."""
    document = yaml.safe_load(source.read_text())
    for name, value in changes.items():
        section, key = name.split("__")
        document["applications"][0]["args"].setdefault(section, {})[key] = value
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


# Configurations


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_shipped_config_is_planned_and_fits_what_it_is_meant_for(path: Path) -> None:
    plan = make_plan(path)
    assert plan.fits
    assert plan.kv_tokens % load(path).verifier.page_size == 0
    assert plan.hardware.startswith("needs ")
    assert bool(plan.points) == (plan.gpu is not None)
    if plan.gpu:
        assert load(path).hardware.gpus == plan.gpus
        assert all(
            sum(d.fixed.values()) + plan.kv_tokens * d.per_token <= plan.memory_per_gpu for d in plan.memory.loads
        )


def test_the_five_configs_are_there() -> None:
    names = {"smollm2-cpu", "smollm2-gpu", "qwen3-8b-1gpu", "kimi-k2.6-8gpu", "tiny-mla-tp2-cpu"}
    assert names <= {path.stem for path in CONFIGS}


def test_what_hardware_each_needs() -> None:
    """Eight GPUs for Kimi with the drafter on a share of one; one GPU for Qwen; two ranks of a CPU are no GPU."""
    kimi, qwen = load(KIMI), load(QWEN)
    assert (kimi.gpus_needed, kimi.verifier.tensor_parallel_size, kimi.target.dtype) == (8, 8, "bfloat16")
    assert 0 < kimi.drafter.num_gpus < 1
    assert qwen.gpus_needed == 1
    assert load(REPOSITORY / "configs/tiny-mla-tp2-cpu.yaml").gpus_needed == 0
    assert "8 GPUs of one host" in make_plan(KIMI).hardware
    assert "1 GPU " in make_plan(QWEN).hardware


def test_gpu_kinds_are_the_schema_s() -> None:
    kinds = get_args(get_args(HardwareConfig.model_fields["gpu"].annotation)[0])
    assert set(kinds) == set(GPUS)


@pytest.mark.parametrize("path", sorted(SHAPES.glob("*.json")), ids=lambda path: path.stem)
def test_shapes_say_where_they_are_from(path: Path) -> None:
    assert len(json.loads(path.read_text())["_source"]) > 20


def test_the_shape_of_the_embedded_model_is_what_prepare_writes(target_dir: Path) -> None:
    written = json.loads((target_dir / "config.json").read_text())
    assert all(written[key] == value for key, value in facts("smollm2-135m-instruct").items() if key != "_source")


# Sizes


def test_kimi_by_hand() -> None:
    """Counted from config.json; the published sum is the checkpoint's: 554.30 GiB, vision tower (0.9 GB) included.

    experts   60 layers × 384 × 3 × 7168 × 2048                                     1,014,686,023,680
    shared    60 × 3 × 7168 × 2048                                                      2,642,411,520
    attention 61 × (7168×1536 + 1536×64×192 + 7168×576 + 512×64×256 + 64×128×7168)      6,168,444,928
    dense     3 × 7168 × 18432                                                            396,361,728
    router    60 × (384 × 7168 + 384)                                                     165,173,760
    ends      2 × 163840 × 7168                                                         2,348,810,240
    norms     61 × (2 × 7168 + 1536 + 512) + 7168                                           1,006,592
    The paper says 1.04T of the model it trained; its layer for multi-token prediction (17B) is not in the checkpoint.
    """
    kimi = shape("kimi-k2.6")
    by_part: dict[str, int] = {}
    for tensor in kimi.tensors():
        by_part[tensor.part] = by_part.get(tensor.part, 0) + tensor.parameters
    ends = by_part.pop("embedding") + by_part.pop("lm_head")
    assert ends == 2_348_810_240
    assert by_part == {
        "experts": 1_014_686_023_680,
        "shared experts": 2_642_411_520,
        "attention": 6_168_444_928,
        "mlp": 396_361_728,
        "router": 165_173_760,
        "norms": 1_006_592,
    }
    assert kimi.parameters == 1_026_408_232_448
    memory = make_plan(KIMI).memory
    # 4 bits and 16 of scale for every 32: 0.5625 bytes. 570.76 GB, and the rest in bfloat16.
    assert sum(part.bytes for part in memory.weights) == pytest.approx(1_014_686_023_680 * 0.5625 + 11_722_208_768 * 2)
    assert sum(part.bytes for part in memory.weights) == pytest.approx(554.30 * GIB - 0.93e9, rel=0.01)
    assert memory.active_parameters == pytest.approx(32.6e9, rel=0.01)  # the paper's activated parameters
    # A rank: an eighth, but q_a, kv_a, router and norms whole, and vLLM's W_UK and W_UV beside kv_b.
    whole = 2 * (61 * (7168 * 1536 + 7168 * 576) + 165_173_760 + 1_006_592)
    eighth = (sum(part.bytes for part in memory.weights) - whole) / 8
    copies = 2 * 61 * 512 * 64 * 256 / 8
    assert memory.weight_bytes_per_gpu == pytest.approx(eighth + whole + copies, rel=1e-6)
    assert memory.weight_bytes_per_gpu == pytest.approx(75e9, rel=0.02)
    assert memory.kv_bytes_per_token == 61 * 576 * 2
    # 6 × (2 × 7168 × (64 + 8) × 128 + 3 × 7168 × 18432) + 6 × 7168², and norms: 6.48 GiB, as published
    assert memory.drafter is not None
    assert memory.drafter.weights == pytest.approx(6.48 * GIB, rel=0.001)
    assert memory.drafter.context_per_token == 6 * 2 * 8 * 128 * 2
    assert memory.drafter.ends == 2 * 163840 * 7168 * 2


def test_qwen_by_hand() -> None:
    """36 × (4096 × (32 + 8 + 8 + 32) × 128 + 3 × 4096 × 12288 + 2 × 4096 + 2 × 128) + 2 × 151936 × 4096 + 4096."""
    memory = make_plan(QWEN).memory
    assert memory.parameters == 8_190_735_360  # as the checkpoint's headers say
    assert memory.weight_bytes_per_gpu == 16_381_470_720
    assert memory.kv_bytes_per_token == 36 * 2 * 8 * 128 * 2
    assert memory.drafter is not None
    assert memory.drafter.parameters == 1_048_626_432  # as its header says
    assert memory.drafter.context_per_token == 5 * 2 * 8 * 128 * 2


def test_smollm_by_hand() -> None:
    """30 × (576 × (9 + 3 + 3 + 9) × 64 + 3 × 576 × 1536 + 2 × 576) + 49152 × 576 + 576, the embedding tied."""
    memory = make_plan(REPOSITORY / "configs/smollm2-cpu.yaml").memory
    assert memory.parameters == 134_515_008
    assert memory.kv_bytes_per_token == 30 * 2 * 3 * 64 * 2
    assert memory.drafter is not None and memory.drafter.ends == 49152 * 576 * 2


def test_a_path_head_by_hand(tmp_path: Path) -> None:
    """bfloat16: 2 × 49152 × 64 + 64 × 576. For each of 32 candidates of a slot 2 × 64 factors and 2 × 32 log-probs, float32."""
    import torch

    from ddtree.deployments.shapes import shipped_checkpoints
    from ddtree.drafter.path_head import PathHead

    source = REPOSITORY / "configs/smollm2-cpu.yaml"
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(shipped_checkpoints() / "smollm2-135m", checkpoint)
    shapes = {"markov_w1.weight": (49152, 64), "markov_w2.weight": (49152, 64), "gate.weight": (64, 576)}
    tensors = {name: torch.zeros(shape) for name, shape in shapes.items()}
    PathHead(tensors, vocab_size=49152, hidden_size=576).save(checkpoint)
    assert path_head_size(checkpoint) == (64, 6_328_320)
    with_head = make_plan(edited(tmp_path, source, drafter__checkpoint=str(checkpoint))).memory
    plain = make_plan(edited(tmp_path, source, drafter__path_head=False)).memory
    unused = make_plan(edited(tmp_path, source, drafter__checkpoint=str(checkpoint), drafter__path_head=False)).memory
    assert with_head.drafter is not None and plain.drafter is not None and unused.drafter == plain.drafter
    config = load(source)
    each = 15 * 32 * (2 * 64 + 2 * 32) * 4
    assert (config.tree.top_k, with_head.drafter.path_head) == (32, 12_656_640)
    more = with_head.drafter.activations - plain.drafter.activations
    assert more == config.scheduler.max_sequences * each
    assert with_head.smallest_budget - plain.smallest_budget == 12_656_640 + more
    code, text = ddtree(str(edited(tmp_path, source, drafter__checkpoint=str(checkpoint))))
    assert code == 0 and "drafter path head" in text


def test_deepseek_v3_has_its_published_size() -> None:
    """671B parameters, 37B activated: the same formula on the model that Kimi's architecture is from."""
    text = facts("kimi-k2.6")["text_config"]
    sizes = {"n_routed_experts": 256, "num_attention_heads": 128, "first_k_dense_replace": 3, "vocab_size": 129280}
    config = {**text, **sizes, "model_type": "deepseek_v3", "quantization_config": None}
    deepseek = TargetShape.from_config(config, "DeepSeek-V3")
    assert deepseek.parameters == pytest.approx(671e9, rel=0.001)


@pytest.mark.parametrize("name", ["smollm2-135m-instruct", "qwen3-8b", "kimi-k2.6", "tiny-mla"])
def test_parameters_are_transformers(name: str) -> None:
    """The model that transformers makes of the same config.json, without memory for its weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    whole = facts(name)
    config = dict(whole.get("text_config") or whole)
    config.pop("quantization_config", None)
    config.pop("_source", None)
    kind = config.pop("model_type").replace("kimi_k2", "deepseek_v3")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **config))
    buffers = sum(buffer.numel() for key, buffer in model.named_buffers() if "e_score_correction" in key)
    assert shape(name).parameters == sum(p.numel() for p in model.parameters()) + buffers


@pytest.mark.parametrize("config", ["kimi-k2.6-8gpu", "qwen3-8b-1gpu", "smollm2-gpu", "tiny-mla-tp2-cpu"])
def test_drafter_parameters_are_the_module_s(config: str) -> None:
    import torch

    from ddtree.drafter.config import DrafterConfig
    from ddtree.drafter.dflash import DFlashModel

    plan = make_plan(REPOSITORY / f"configs/{config}.yaml")
    place = REPOSITORY / plan.drafter_facts if plan.drafter_facts else Path()
    with torch.device("meta"):
        model = DFlashModel(DrafterConfig.from_dict(json.loads(place.read_text())))
    assert plan.memory.drafter is not None
    assert plan.memory.drafter.parameters == sum(p.numel() for p in model.parameters())
    assert plan.memory.drafter.layer_parameters == plan.memory.drafter.parameters - sum(
        p.numel() for module in (model.fc, model.hidden_norm) for p in module.parameters()
    )


def test_activations_by_hand() -> None:
    """Kimi: 32 trees of 64 rows and 2048 of prompts, R = 4096; S = 2049 rows get a token.

    R × (4 × 7168 + 8 × (3 × 2048 / 8 + 7168)) × 2, its experts being the widest part of a layer;
    R × 8 heads × (512 + 2) × 8 × 4; R × 6 × 7168 × 2 × 2; S × 163840 × 4 × 2.
    """
    fixed = make_plan(KIMI).memory.loads[0].fixed
    rows = (4 * 7168 + 8 * (768 + 7168)) * 2 + 8 * 514 * 32 + 6 * 7168 * 4
    assert fixed["target activations"] == 4096 * rows + 2049 * 163840 * 8


@pytest.mark.parametrize("path", [KIMI, QWEN], ids=lambda path: path.stem)
def test_the_fullest_gpu_decides_and_has_no_room_for_a_page_more(path: Path) -> None:
    """It is the one that the drafter shares: a token there costs its KV and, twice, its context."""
    plan = make_plan(path)
    drafter, shared = plan.memory.drafter, plan.memory.loads[0]
    assert drafter is not None
    assert shared.per_token == plan.memory.kv_bytes_per_token + 2 * drafter.context_per_token
    more = plan.kv_tokens + load(path).verifier.page_size
    assert sum(shared.fixed.values()) + more * shared.per_token > plan.memory_per_gpu


def test_a_drafter_with_a_gpu_of_its_own(tmp_path: Path) -> None:
    plan = make_plan(edited(tmp_path, QWEN, drafter__num_gpus=1, hardware__gpus=2))
    verifier, drafter = plan.memory.loads
    assert (plan.gpus, verifier.per_token, drafter.per_token) == (2, 147_456, 2 * 20_480)
    assert "target weights" not in drafter.fixed and "drafter weights" not in verifier.fixed
    assert plan.kv_tokens > make_plan(QWEN).kv_tokens


def test_tokens_that_were_asked_for(tmp_path: Path) -> None:
    plan = make_plan(edited(tmp_path, QWEN, verifier__kv_tokens=100_000))
    assert plan.kv_tokens == 100_000 // 64 * 64
    assert "100,000 tokens (as configured)" in plan.hardware


def test_a_share_that_is_too_small_is_noted(tmp_path: Path) -> None:
    notes = make_plan(edited(tmp_path, QWEN, drafter__num_gpus=0.1)).notes
    assert any("drafter.num_gpus says 0.1: raise it" in note for note in notes)
    assert not any("raise it" in note for note in make_plan(QWEN).notes)


def test_no_drafter_is_plain_decoding(tmp_path: Path) -> None:
    plan = make_plan(edited(tmp_path, QWEN, drafter__checkpoint=None))
    assert plan.memory.drafter is None
    assert {point.speedup for point in plan.points} == {1.0}


def test_quantisation_follows_the_ignore_list() -> None:
    kimi = shape("kimi-k2.6")
    assert kimi.quantisation is not None
    assert {tensor.part for tensor in kimi.tensors() if kimi.quantisation.covers(tensor)} == {"experts"}


def test_kv_heads_are_repeated_where_ranks_outnumber_them() -> None:
    qwen = shape("qwen3-8b")
    widths = {ranks: qwen.attention.kv_width(ranks) for ranks in (1, 2, 8, 16)}
    assert widths == {1: 2048, 2: 1024, 8: 256, 16: 256}
    k_proj = next(tensor for tensor in qwen.tensors() if tensor.name.endswith("k_proj"))
    assert k_proj.on_rank(16) == k_proj.on_rank(8) == k_proj.parameters // 8


# Laws


@settings(deadline=None, max_examples=30)
@given(st.sampled_from([KIMI, QWEN]), st.floats(1, 400), st.floats(1, 400))
def test_more_memory_never_fits_fewer_tokens(path: Path, a: float, b: float) -> None:
    less, more = (make_plan(path, PlanOptions(gpu_memory_gib=gib)) for gib in sorted((a, b)))
    assert less.kv_tokens <= more.kv_tokens
    assert less.fits <= more.fits


@settings(deadline=None)
@given(st.sampled_from(["kimi-k2.6", "qwen3-8b", "tiny-mla"]), st.sampled_from([1, 2, 4, 8, 16, 32]))
def test_ranks_hold_the_whole_model_and_more_ranks_hold_less_each(name: str, ranks: int) -> None:
    for tensor in shape(name).tensors():
        assert tensor.on_rank(ranks) * ranks >= tensor.parameters >= tensor.on_rank(ranks) >= tensor.on_rank(2 * ranks)


@settings(deadline=None)
@given(st.integers(1, 4096), st.integers(0, 512))
def test_expected_experts(rows: int, more: int) -> None:
    experts = shape("kimi-k2.6").experts
    assert experts is not None
    few, many = experts.expected_distinct(rows), experts.expected_distinct(rows + more)
    assert experts.per_token - 1e-9 <= few <= many <= experts.count
    assert few <= rows * experts.per_token + 1e-6
    tiny = shape("tiny-mla").experts
    assert tiny is not None
    assert [tiny.expected_distinct(n) for n in (1, 2)] == pytest.approx([2, 2 + 2 * 6 / 8])


@settings(deadline=None, max_examples=30)
@given(st.data())
def test_more_work_never_takes_less_time(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(["kimi-k2.6", "qwen3-8b"]))
    path = KIMI if name == "kimi-k2.6" else QWEN
    ranks = load(path).verifier.tensor_parallel_size
    drafter = make_plan(path).memory.drafter
    h200 = Roofline(GPUS["H200"], shape(name), ranks, "bfloat16", drafter, 8, (None,))
    batch, context, budget = (data.draw(st.integers(1, most)) for most in (64, 65536, 255))
    base = h200.point(batch, context, budget, 4.0, 0)
    assert base.plain.seconds <= base.speculative.seconds
    assert h200.point(batch + 1, context, budget, 4.0, 0).plain.seconds >= base.plain.seconds
    assert h200.point(batch, context + 64, budget, 4.0, 0).speculative.seconds >= base.speculative.seconds
    assert h200.point(batch, context, budget + 1, 4.0, 0).speculative.seconds >= base.speculative.seconds
    faster = replace(h200, gpu=GPUS["B200"]).point(batch, context, budget, 4.0, 0)
    assert faster.speculative.seconds <= base.speculative.seconds
    assert base.speedup == pytest.approx(4.0 * base.plain.seconds / base.speculative.seconds)


def test_a_round_by_hand() -> None:
    """Qwen3-8B on an H200, one sequence of 4096 tokens, tree of 31 nodes: everything is read once.

    plain: (8,190,735,360 − 622,329,856 of the embedding) × 2 bytes = 15.14 GB, and 4096 × 147,456 bytes of KV
    """
    plan = make_plan(QWEN, PlanOptions(messages_s=0))
    point = plan.points[0]
    weights, kv = 15_136_811_008 / 4.26e12, 4096 * 147_456 / 4.26e12
    assert (point.batch, point.context, point.rows) == (1, 4096, 32)
    assert point.plain.seconds == pytest.approx(weights + kv)
    draft = (2_097_252_864 + 151936 * 4096 * 2 + 4096 * 20_480) / 4.26e12
    assert point.speculative.seconds == pytest.approx(weights + kv + draft)
    # 32 × 32 rows multiply 7.57 G parameters: 2 × 1024 × 7,568,405,504 FLOP take longer than reading them
    many = next(p for p in plan.points if p.batch == 32)
    assert many.speculative.matrices == pytest.approx(2 * 1024 * 7_568_405_504 / 787e12)


def test_a_round_of_experts_by_hand() -> None:
    """Kimi on eight H200s, 32 sequences of 32,768 tokens, trees of 8 nodes and a root: 288 rows of 8 heads.

    Even and independent choices leave 384 × (376/384)^288 = 0.9 experts of a layer unread.
    """
    point = next(p for p in make_plan(KIMI).points if (p.batch, p.context) == (32, 32768))
    step = point.speculative
    assert point.distinct_experts == pytest.approx((384 * (1 - (376 / 384) ** 32), 384 * (1 - (376 / 384) ** 288)))
    experts = 1_014_686_023_680 * 0.5625 / 8
    assert step.experts == pytest.approx(experts * (1 - (376 / 384) ** 288) / 4.26e12)
    # 61 layers of 576 values: reading them takes longer than 288 rows × 8 heads × 2 × (576 + 512) FLOP
    assert step.attention == pytest.approx(32 * 32768 * 61 * 576 * 2 / 4.26e12)
    assert step.attention > 288 * 32768 * 8 * 2 * 1088 * 61 / 787e12
    # 123 all-reduces of 288 rows × 7168 in bfloat16
    assert step.all_reduce == pytest.approx(123 * (8e-6 + 2 * 7 / 8 * 288 * 7168 * 2 / 392e9))
    assert point.plain.all_reduce == pytest.approx(123 * (8e-6 + 2 * 7 / 8 * 32 * 7168 * 2 / 392e9))
    assert (step.messages, point.fits) == (0.8e-3, False)


def test_large_trees_make_attention_multiply_more_than_it_reads(tmp_path: Path) -> None:
    point = make_plan(edited(tmp_path, KIMI, tree__budget=63)).points[-1]
    assert point.speculative.attention == pytest.approx(32 * 64 * 32768 * 8 * 2 * 1088 * 61 / 787e12)


def test_a_tied_embedding_is_read_as_the_lm_head() -> None:
    point = make_plan(REPOSITORY / "configs/smollm2-gpu.yaml").points[0]
    assert point.plain.matrices == pytest.approx(134_515_008 * 2 / 4.26e12)


def test_a_cpu_holds_every_rank_and_the_drafter() -> None:
    """tiny-mla, float32: two ranks with 3 layers of 576 values, and twice the context of 2 layers of 2 × 2 × 32."""
    plan = make_plan(REPOSITORY / "configs/tiny-mla-tp2-cpu.yaml")
    [load] = plan.memory.loads
    assert load.per_token == 2 * 3 * 576 * 4 + 2 * 2 * 2 * 2 * 32 * 4
    assert load.fixed["target weights"] == 2 * plan.memory.weight_bytes_per_gpu
    assert plan.memory.one_sequence == 1024 + 63 + 1  # and max_budget nodes with a root
    assert (plan.gpu, plan.points, plan.memory_per_gpu) == (None, (), 0)


# What it refuses


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"target__model": "org/Unknown-7B"}, "give its config.json with --target-config FILE"),
        ({"drafter__checkpoint": "org/Unknown-DFlash"}, "give its config.json with --drafter-config FILE"),
        ({"drafter__checkpoint": "kimi-k2.6-dflash"}, "drafter made for another target"),
        ({"verifier__backend": "vllm", "verifier__tensor_parallel_size": 3}, "hardware.gpus (1) is below the 3"),
        ({"hardware__gpu": None}, "no GPU is named: give --gpu or hardware.gpu as one of H100, H200, B200"),
        ({"drafter__device": "cpu", "drafter__num_gpus": 0}, "a drafter on a cpu beside a target on GPUs"),
        ({"verifier__rooms": 3}, "unknown key 'verifier.rooms'"),
    ],
)
def test_what_cannot_be_planned(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    code, text = ddtree(str(edited(tmp_path, QWEN, **changes)))
    assert code == 1
    assert text.startswith("error: ") and says in text and "\n" not in text.strip()


def test_ranks_that_do_not_divide_the_heads(tmp_path: Path) -> None:
    path = edited(tmp_path, KIMI, verifier__tensor_parallel_size=6)
    code, text = ddtree(str(path))
    assert code == 1
    assert "6 does not divide the target's 64 attention heads; these do: 1, 2, 4, 8, 16, 32, 64" in text


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((str(KIMI), "--acceptance-length", "9"), "a round gains 1 to 8 tokens"),
        ((str(KIMI), "--gpu", "A100"), "unknown GPU 'A100'"),
        ((str(REPOSITORY / "configs/smollm2-cpu.yaml"), "--gpu", "H200"), "need verifier.device cuda"),
        ((str(QWEN), "--target-config", "/nowhere.json"), "cannot read /nowhere.json"),
        ((str(QWEN), "--target-config", str(QWEN)), "is not valid JSON"),
        ((str(QWEN), "--target-config", str(SHAPES / "kimi-k2.6.json")), "drafter made for another target"),
        ((str(QWEN), "--target-config", str(SHAPES / "qwen3-8b-dflash-b16.json")), "drafter made for another target"),
    ],
)
def test_options_it_refuses(arguments: tuple[str, ...], says: str) -> None:
    code, text = ddtree(*arguments)
    assert code == 1
    assert says in text


def test_a_config_of_one_s_own(tmp_path: Path) -> None:
    """A target that is not shipped is sized from the file given."""
    mine = tmp_path / "mine.json"
    mine.write_text(json.dumps({**facts("qwen3-8b"), "intermediate_size": 6144}))
    path = edited(tmp_path, QWEN, target__model="me/mine")
    code, text = ddtree(str(path), "--target-config", str(mine), "--json")
    assert code == 0
    assert json.loads(text)["memory"]["parameters"] == 8_190_735_360 - 36 * 3 * 4096 * 6144


@pytest.mark.parametrize(
    "bad", [{"model_type": "mamba"}, {"model_type": "qwen3"}, {"quantization_config": {"quant_method": "fp8"}}]
)
def test_a_config_that_cannot_be_sized(bad: dict[str, Any]) -> None:
    config = bad if "model_type" in bad else {**facts("qwen3-8b"), **bad}
    with pytest.raises(ValueError, match=r"cannot be sized|lacks the number"):
        TargetShape.from_config(config, "it")


# The command


def test_the_command_prints_the_plan() -> None:
    code, text = ddtree(str(KIMI))
    assert code == 0, text
    for words in ("needs 8 GPUs", "experts", "KV tokens: ", "verifier + drafter GPU", "rounds on H200", "vision tower"):
        assert words in text
    assert "does not fit" not in text


def test_the_command_says_where_it_does_not_fit() -> None:
    code, text = ddtree(str(KIMI), "--gpu", "H100")
    assert code == 1
    assert "does not fit" in text and "not measured" in text


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ((), PlanOptions()),
        (("--acceptance-length", "3", "--gpu", "B200"), PlanOptions(acceptance_length=3, gpu="B200")),
        (("--messages-ms", "0"), PlanOptions(messages_s=0)),
    ],
)
def test_json_is_the_plan(arguments: tuple[str, ...], options: PlanOptions) -> None:
    """The command's own defaults are those of PlanOptions."""
    code, text = ddtree(str(KIMI), "--json", *arguments)
    assert code == 0
    told, plan = json.loads(text), make_plan(KIMI, options)
    assert told["kv_tokens"] == plan.kv_tokens
    assert told["memory"]["weight_bytes_per_gpu"] == plan.memory.weight_bytes_per_gpu
    assert [point["speedup"] for point in told["points"]] == pytest.approx([point.speedup for point in plan.points])


def test_planning_loads_no_torch() -> None:
    import subprocess
    import sys

    code = (
        "import sys; from pathlib import Path; from ddtree.deployments.commands.plan import make_plan; "
        f"make_plan(Path({str(QWEN)!r})); sys.exit('torch' in sys.modules or 'ray' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
