"""The actors that hold a device: DrafterActor and VerifierRank. Each is made, watched and replaced by its Serve replica.

Heavy imports stay inside the methods: a replica imports this module to make the actor and must stay light (no torch).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import ray
from ray import cloudpickle
from ray.exceptions import ActorDiedError, RayError

from ddtree.deployments.cores import usable_cores
from ddtree.deployments.device_thread import DeviceThread
from ddtree.deployments.openmp import end_threads

if TYPE_CHECKING:
    from ray.actor import ActorHandle

    from ddtree.deployments.config import AppConfig
    from ddtree.deployments.costs import TimedSteps
    from ddtree.deployments.desk import Desk
    from ddtree.deployments.mailbox import Arena
    from ddtree.deployments.models import Models
    from ddtree.drafter.items import Candidates, DraftItem
    from ddtree.verifier.batch import VerifyBatch, VerifyResult

P = ParamSpec("P")
T = TypeVar("T")
LIVES_S = 2  # so long a router may take to say that it lives


class MailActor:
    """What the router asks of every device actor, to find it and to reach it through mailboxes."""

    _desk: Desk  # where the configuration wants one

    def ping(self) -> bool:
        return True

    def node(self) -> str:
        """Ray's id of the node it runs on."""
        node: str = ray.get_runtime_context().get_node_id()
        return node

    def outbox(self) -> Arena:
        """Where its results lie. Returned as an RDT object, which passes the arena by reference."""
        return self._desk.arena

    def address(self) -> Path:
        """Where its calls are answered."""
        return self._desk.address

    def introduce(self, role: str, arena: Arena) -> None:
        """See `Desk.introduce`."""
        self._desk.introduce(role, arena)


@ray.remote(num_cpus=0, enable_tensor_transport=True)
class DrafterActor(MailActor):
    """Runs the DFlash forward and owns the context cache of its sequences."""

    def __init__(self, config: AppConfig, models: Models) -> None:
        from ddtree.deployments import bounds, node_transport
        from ddtree.deployments.desk import Desk
        from ddtree.deployments.loading import load_drafter
        from ddtree.deployments.mailbox import Outbox
        from ddtree.drafter.items import unpacked

        node_transport.register()
        self._thread = _device_thread(config)
        self._drafter = self._thread.run(load_drafter, config, models)
        if config.transport != "objects":
            outbox = Outbox(config.drafter.device, bounds.of_drafter(config, models))
            methods = {"draft": lambda items, verified: self._draft(unpacked(items), verified)}
            self._desk = Desk(self._thread, outbox, methods)

    def pid(self) -> int:
        return os.getpid()

    def sequences(self) -> int:
        """Sequences whose context is held."""
        return self._thread.run(lambda: self._drafter.sequences)

    def load(self) -> tuple[float, int]:
        """Seconds that it has computed so far, and the sequences whose context it holds: what autoscaling goes by."""
        return self._thread.busy_seconds, self.sequences()

    def compute_seconds(self) -> float:
        """What its device has computed so far."""
        return self._drafter.compute_seconds

    def draft(self, items: list[DraftItem], verified: VerifyResult | None, to_host: bool) -> Candidates:
        """Feed the items' new context rows and draft for those with a bonus. Returned as an RDT object, unless `to_host`."""
        return self._thread.run(_complete, to_host, self._draft, items, verified)

    def release(self, sequences: list[str] | None) -> None:
        """Forget the contexts of these sequences; None: of all."""
        self._thread.run(self._drafter.release, sequences)

    def _draft(self, items: list[DraftItem], verified: VerifyResult | None) -> Candidates:
        return self._drafter.draft(items, [verified.features] if verified else [])


@ray.remote(num_cpus=0, enable_tensor_transport=True)
class VerifierRank(MailActor):
    """Runs the target forward, or this rank's part of it, and owns this rank's part of the KV pool."""

    def __init__(self, config: AppConfig, models: Models) -> None:
        """Loads nothing yet: the ranks of a group must all exist before they can meet."""
        from ddtree.deployments import node_transport, wire

        node_transport.register()
        self._config, self._models = config, models
        self._router: ActorHandle | None = None  # whose group this is
        self._loads = wire.loads
        self._thread = _device_thread(config)
        self._begun = 0
        self._timed: TimedSteps | None = None

    def pid(self) -> int:
        return os.getpid()

    def meeting_place(self) -> str:
        """Where the ranks of a group meet: an address on this rank's host, for the first of them to listen at."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"tcp://{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"

    def load(self, rank: int, world_size: int, meeting_place: str) -> None:
        """Load this rank's part of the target. Returns when all ranks have theirs."""
        from ddtree.deployments import bounds
        from ddtree.deployments.desk import Desk
        from ddtree.deployments.loading import load_target
        from ddtree.deployments.mailbox import Bound, Outbox
        from ddtree.verifier.backends import Ranks
        from ddtree.verifier.dtype import resolve_dtype

        config, models = self._config, self._models
        self._target = self._thread.run(load_target, config, models, Ranks(rank, world_size, meeting_place))
        if config.transport != "objects":
            device = config.verifier.device
            bound = bounds.of_verifier(config, models, resolve_dtype(config.target.dtype, device).itemsize)
            outbox = Outbox(device, Bound(0, "a rank that only follows") if rank else bound)
            methods = {"step": self._step, "follow": self._follow}
            self._desk = Desk(self._thread, outbox, methods, self._target.prepare)

    def free(self, router: ActorHandle) -> bool:
        """Whether the group is this router's to claim: nobody else has it that lives. The first rank knows."""
        return self._router in (None, router) or not _lives(self._router)

    def claim(self, router: ActorHandle) -> bool:
        """Have the group for itself from now on. False where it is not free."""
        if not self.free(router):
            return False
        self._router = router
        return True

    def release(self, router: ActorHandle) -> None:
        """This router wants another group, or none."""
        if self._router == router:
            self._router = None

    def pages(self) -> int:
        """Pages of the KV pool; the same on every rank."""
        return self._target.pool.pages

    def compute_seconds(self) -> float:
        """What its device has computed so far."""
        return self._target.compute_seconds

    def timed(self) -> TimedSteps | None:
        """What a router found steps of this group to take, for the next one; None: nobody timed them yet."""
        return self._timed

    def keep_timed(self, steps: TimedSteps) -> None:
        self._timed = steps

    def step(self, batch: bytes, to_host: bool) -> VerifyResult:
        """One verify step over a VerifyBatch in wire form. Returned as an RDT object, unless `to_host`."""
        return self._thread.run(_complete, to_host, self._step, self._loads(batch))

    def follow(self, batch: bytes) -> None:
        """The same step on a rank whose result nobody wants: the first rank has it all."""
        self._thread.run(self._follow, self._loads(batch))

    def steps(self) -> int:
        """Steps that it has begun. Where ranks differ, those with more wait for the others inside a step, which was sent to them
        alone: who sent it died on the way."""
        return self._begun

    def _step(self, batch: VerifyBatch) -> VerifyResult:
        self._begun += 1
        return self._target.step(batch)

    def _follow(self, batch: VerifyBatch) -> None:
        self._step(batch)


def _lives(router: Any) -> bool:
    """One that does not answer lives, until who watches it ends it."""
    try:
        ray.get(router.pid.remote(), timeout=LIVES_S)
    except ActorDiedError:
        return False
    except RayError:
        return True
    return True


def _device_thread(config: AppConfig) -> DeviceThread:
    """Drafter and verifier compute in turn. Where they have more threads than there are cores, those of one are not to spin on
    when it is the other's turn."""
    verifier, drafter = config.verifier, config.drafter
    both = drafter.checkpoint is not None and verifier.device == drafter.device == "cpu"
    threads = verifier.tensor_parallel_size * verifier.threads + drafter.threads
    return DeviceThread(rest=end_threads) if both and threads > usable_cores() else DeviceThread()


def _complete(to_host: bool, run: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The message that `run` gives in memory of its own, with nothing of it left to do on a GPU, or on the host altogether."""
    import torch

    from ddtree.verifier.transfer import own, to_device

    result = run(*args, **kwargs)
    if torch.cuda.is_initialized():
        torch.cuda.current_stream().synchronize()
        result = own(result)
    return to_device(result, torch.device("cpu")) if to_host else result


def pack(ranks: Sequence[ActorHandle]) -> bytes:
    """What a Serve call returns for these. As handles in its result Ray 2.60 counts their references, and now and then that ended
    the process that got them ("Check failed: it->second.owned_by_us_"). Nothing is lost: ranks live as long as their maker."""
    return cloudpickle.dumps([*ranks])


def unpack(packed: bytes) -> list[ActorHandle]:
    """Handles that are not counted. They have what `ray.get_actor` forgets: that results may be passed by reference."""
    ranks: list[ActorHandle] = cloudpickle.loads(packed)
    return ranks


def make(actor_class: Any, *args: Any, **options: Any) -> ray.actor.ActorHandle:
    """Create an actor, with Ray's options. The caller owns it: it dies with the caller. With a share of a GPU (`num_gpus`) it
    sees that GPU, without it none."""
    handle: ray.actor.ActorHandle = actor_class.options(**options).remote(*args)
    return handle
