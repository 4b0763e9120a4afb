"""Every command that a page shows in a bash block is run: here, elsewhere in the suite, or for a stated reason nowhere in CI.

Commands run here run as they stand, in a folder that holds what they name. Beside that they are told where the server is, and to
be brief. Knows no models: those are the running deployment's, or the embedded one.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from benchmarks.elastic.drafters import DASHBOARD

from .conftest import REPOSITORY, Deployment

PAGES = [REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("*.md")]
PAGES += (REPOSITORY / "drafter/checkpoints").glob("*/README.md")
BLOCK = re.compile(r"^```bash\n(.*?)^```$", re.M | re.S)
EXTRAS = re.compile(r"\.\[([\w,]+)\]")
PROMPTS = ["FILE", "my_prompts", "gsm8k_test", "mt_bench"]
TYPED = "What is the capital of France?\n/quit\n"
SERVER = "http://127.0.0.1:8000"  # as pages have it


@dataclass(frozen=True)
class Here:
    """How commands are run that begin so."""

    shows: str  # a word of what it prints
    more: str = ""  # options
    asks: bool = False  # the running deployment


HERE = {
    "curl": Here("Paris", "--fail", asks=True),
    "ddtree bench": Here("tokens/s", f"--url {SERVER} --limit 2 --max-tokens 8", asks=True),
    "ddtree chat": Here("tokens a round", f"--url {SERVER} --max-tokens 12", asks=True),
    "ddtree doctor": Here("can run here"),
    "ddtree eval-drafter": Here("calibration", "--limit 1 --tokens 12 --budgets 8,16 --threads 1"),
    "ddtree plan": Here("tokens"),
    "ddtree train-drafter --help": Here("--minutes"),
    "serve deploy": Here("deploy request", asks=True),
    "serve status": Here("RUNNING", asks=True),
}

INSTALL = "Makefile:$(VENV)/.serve"
SERVE = "tests/deployments/test_service.py::test_paris"  # asks what `ddtree serve` started, which starts `serve run`
ELSEWHERE = {
    "make serve": (INSTALL, "Makefile:serve", SERVE),
    "make test": ("Makefile:test",),
    "python3 -m venv .venv && . .venv/bin/activate": (INSTALL,),
    "pip install -e .": (INSTALL,),
    'pip install -e ".[train]"': ("Makefile:$(VENV)/.test",),  # matplotlib; the others' packages are in there too
    'pip install -e ".[cuda]"': ("Makefile:$(VENV)/.test",),
    "serve run configs/smollm2-cpu.yaml": (SERVE,),
    "ddtree serve configs/smollm2-cpu.yaml": (SERVE,),
    "ddtree train-drafter --target path/to/target --out-dir runs/mine --minutes 20 --evaluate my_prompts.jsonl": (
        "tests/drafter/training/test_pipeline.py::test_interrupted_run_continues_and_publishes",
        "tests/drafter/training/test_options.py::test_every_option_is_a_flag_and_defaults_agree",
    ),
    "ddtree train-drafter --initial smollm2-135m --prompts my_traffic.jsonl --out-dir runs/mine --minutes 10": (
        "tests/drafter/training/test_initial.py::test_it_has_the_checkpoints_shape_and_learns_on",
    ),
    "torchrun --nproc-per-node 8 -m ddtree.drafter.training --target-dir path/to/target --out-dir runs/mine": (
        "tests/drafter/training/test_ranks.py::test_a_whole_run_of_two",
    ),
}

GPU = "needs a GPU"
HOSTS = "is for several machines, and a Ray that it starts ends only with every other on this one"
NVCC = "needs nvcc; where there is one tests/kernels/test_native_build.py builds the same"
NODE = "needs node and npm's packages; tests/deployments/playground/test_build.py holds the build to its sources"
TRAINING = "takes minutes of an H200, and data that is not part of the project"
NOT_IN_CI = {
    'pip install -e ".[cuda,vllm]"': "gigabytes of CUDA; CI installs vLLM's CPU build instead",
    "export CUDA_MPS_PIPE_DIRECTORY=/tmp/mps CUDA_MPS_LOG_DIRECTORY=/tmp/mps": GPU,
    "nvidia-cuda-mps-control -d": GPU,
    "echo quit | nvidia-cuda-mps-control": GPU,
    "ddtree serve configs/smollm2-gpu.yaml": GPU,
    "ddtree serve configs/qwen3-8b-1gpu.yaml": GPU,
    "ddtree serve configs/kimi-k2.6-8gpu.yaml": GPU,
    "hf download Qwen/Qwen3-8B --local-dir Qwen/Qwen3-8B": "16 GB",
    "hf download z-lab/Qwen3-8B-DFlash-b16 --local-dir z-lab/Qwen3-8B-DFlash-b16": "2 GB",
    "ray start --head": HOSTS,
    "ray start --address=HEAD:6379": HOSTS,
    "cmake -S kernels/csrc -B build && cmake --build build --parallel": NVCC,
    "python -m ddtree.kernels.build": NVCC,
    "cd deployments/playground": NODE,
    "npm install": NODE,
    "npm run dev": NODE,
    "npm run build": NODE,
    "ddtree train-drafter --out-dir runs/answers --seed 1 --prompts gsm8k_train.jsonl --evaluate held_out.jsonl "
    "--functions 8000 --passages 5000 --generate-seconds 60 --stop-after answers": TRAINING,
    "ddtree train-drafter --out-dir runs/long --seed 1 --context 8192 --long-share 1 --generate-seconds 70 "
    "--stop-after answers": TRAINING,
    "ddtree train-drafter --out-dir runs/smollm2-135m --seed 1 --initial smollm2-135m --context 8192 --path-rank 64 "
    "--path-joint 1 --train-seconds 169 --prompts gsm8k_train.jsonl --evaluate held_out.jsonl --functions 8000 "
    "--passages 5000": TRAINING,
}


def shown(text: str) -> list[str]:
    """The commands of the bash blocks of a page: a line each, without what is said of it."""
    lines = "".join(BLOCK.findall(re.sub(r"\\\n\s*", "", text))).splitlines()
    return [command for line in lines if (command := re.split(r"(?:^|\s)#", line)[0].strip())]


def beginning(command: str) -> str | None:
    """Its key in HERE."""
    return next((key for key in HERE if f"{command} ".startswith(f"{key} ")), None)


COMMANDS = sorted({command for page in PAGES for command in shown(page.read_text("utf-8"))})
RUN = {command: HERE[key] for command in COMMANDS if (key := beginning(command))}


def fill(folder: Path, target: Path, config: Path) -> None:
    """With what the commands name; what pages call the configuration for a laptop is `config`."""
    configs = REPOSITORY / "configs"
    checkpoint = REPOSITORY / "drafter/checkpoints/smollm2-135m"
    some = (REPOSITORY / "tests/data/prompts.jsonl").read_text("utf-8")
    for name in PROMPTS:
        (folder / f"{name}.jsonl").write_text(some, "utf-8")
    for link, there in {
        **{f"configs/{path.name}": path for path in configs.glob("*.yaml")},
        "configs/smollm2-cpu.yaml": config,
        "FILE.yaml": config,
        "my.yaml": configs / "qwen3-8b-1gpu.yaml",
        "config.json": configs / "shapes/qwen3-8b.json",
        "drafter/config.json": configs / "shapes/qwen3-8b-dflash-b16.json",
        "path/to/target": target,
        "DIR": checkpoint,
        "runs/mine/checkpoint": checkpoint,
    }.items():
        (folder / link).parent.mkdir(parents=True, exist_ok=True)
        (folder / link).symlink_to(there)


def run(command: str, how: Here, folder: Path, url: str = SERVER, **environment: str) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", f"{command} {how.more}".replace(SERVER, url)],
        cwd=folder,
        env=os.environ | {"PATH": path, "COLUMNS": "160"} | environment,
        input=TYPED,
        capture_output=True,
        text=True,
        timeout=200,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0 and how.shows in said, said


def rounds(deployment: Deployment) -> int:
    """Of its router, so far."""
    count: int = httpx.get(f"{deployment.url}/health", timeout=30).json()["rounds"]
    return count


@pytest.mark.parametrize("command", [command for command, how in RUN.items() if not how.asks], ids=str)
def test_a_command(command: str, target_dir: Path, tmp_path: Path) -> None:
    fill(tmp_path, target_dir, REPOSITORY / "configs/smollm2-cpu.yaml")
    run(command, RUN[command], tmp_path)


@pytest.mark.parametrize("command", [command for command, how in RUN.items() if how.asks], ids=str)
def test_a_command_that_asks_the_server(command: str, deployment: Deployment, target_dir: Path, tmp_path: Path) -> None:
    fill(tmp_path, target_dir, deployment.config)
    dashboard = DASHBOARD.search(deployment.log.read_text("utf-8"))
    assert dashboard, "Ray says where it is"
    before = rounds(deployment)
    run(command, RUN[command], tmp_path, deployment.url, RAY_AUTH_MODE="token", RAY_DASHBOARD_ADDRESS=dashboard[1])
    assert rounds(deployment) >= before, "its router is the one that was there"


def test_every_command_has_its_place() -> None:
    elsewhere = ELSEWHERE.keys() | NOT_IN_CI.keys()
    assert not elsewhere & RUN.keys() and not ELSEWHERE.keys() & NOT_IN_CI.keys(), "one place each"
    unknown = set(COMMANDS) - elsewhere - RUN.keys()
    assert not unknown, f"no test runs {unknown}: give each a place in HERE, ELSEWHERE or NOT_IN_CI"
    stale = (elsewhere - set(COMMANDS)) | (HERE.keys() - set(map(beginning, COMMANDS)))
    assert not stale, f"no page shows {stale}"


@pytest.mark.parametrize("place", sorted({place for places in ELSEWHERE.values() for place in places}))
def test_where_a_command_is_run_exists(place: str) -> None:
    file, _, name = place.replace("::", ":").partition(":")
    text = (REPOSITORY / file).read_text("utf-8")
    assert re.search(rf"^(def )?{re.escape(name)}[:(]", text, re.M)


def test_extras_exist() -> None:
    known = tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    named = {extra for found in EXTRAS.findall("\n".join(COMMANDS)) for extra in found.split(",")}
    assert named and named <= known.keys(), "pip only warns of others"


def test_commands_of_a_page() -> None:
    page = "```bash\n# first\na --b 1   # says c\n\nd \\\n  --e f\n```\n```yaml\ng: h\n```\n"
    assert shown(page) == ["a --b 1", "d --e f"]
