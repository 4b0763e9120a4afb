"""Other engines on the same model, device and prompts, each in a process of its own. Knows their names, loads none of them.

An engine's module runs as `python -m benchmarks.serving.MODULE JOB.json OUT.json [SETTING]`. Where it fails, the reason is its
result.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .service import Failed, run_child


@dataclass(frozen=True)
class Peer:
    """One engine and the settings to try, in this order, until one runs."""

    module: str
    settings: tuple[str, ...]


PEERS = {
    "generate": Peer("generate_peer", ("dynamic",)),
    "generate-static": Peer("generate_peer", ("static",)),  # compiled: takes a while to start
    "vllm": Peer("vllm_peer", ("default", "triton", "triton-uncompiled", "flex")),
}


@dataclass(frozen=True)
class Job:
    """What a peer is to do."""

    model_dir: str
    device: str  # "cpu" or "cuda"
    dtype: str  # a torch name or "auto"
    threads: int  # on a CPU
    memory_fraction: float  # of a GPU that the peer may fill
    stop_token_ids: tuple[int, ...]
    prompts: tuple[str, ...]
    max_tokens: int
    concurrency: tuple[int, ...]


def run_peer(name: str, job: Job, folder: Path, timeout_s: float, result: dict[str, Any], python: str) -> None:
    """Run a peer with the first of its settings that works.

    Args:
        folder: where its output goes.
        timeout_s: for all its settings together.
        result: gets `runs` by concurrency, as far as they came, `setting`, `versions`, `start_seconds`, and `failures`, the
            reason by setting; also where this is interrupted.
        python: the interpreter.
    """
    result |= {"runs": {}, "failures": {}}
    job_file, out = folder / f"{name}-job.json", folder / f"{name}-out.json"
    job_file.write_text(json.dumps(asdict(job)), encoding="utf-8")
    deadline = time.monotonic() + timeout_s
    for setting in PEERS[name].settings:
        out.unlink(missing_ok=True)
        command = [python, "-m", f"{__package__}.{PEERS[name].module}", str(job_file), str(out), setting]
        try:
            run_child(command, folder / f"{name}-{setting}.log", deadline - time.monotonic())
        except Failed as error:
            result["failures"][setting] = str(error)
        finally:
            if out.exists():
                result |= json.loads(out.read_text(encoding="utf-8")) | {"setting": setting}
        if result["runs"]:
            return
