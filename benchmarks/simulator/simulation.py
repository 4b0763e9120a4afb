"""The clock: events in order of time over pods, the drafters that serve them, and who asks. A seed decides all of a run.

A request goes to the pod with the fewest of those that have a verifier, as from the service's ingress where no prompts begin
alike, but that every pod's load is known at once. An event is an arrival, or the end of a pod's round; a drafter's queue needs
none, as its calls are known in order.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from math import inf

import numpy as np

from .choice import Choice, Draws
from .figures import Figures
from .load import Load, Tokens
from .pod import Pod, Stream
from .processes import NEVER, Drafter, Failures, Process
from .profile import Profile


@dataclass(frozen=True)
class Deployment:
    """What serves. Drafters are dealt out to pods by number, as the service does it; where there are fewer than pods, which the
    service refuses, a drafter is shared by several."""

    pods: int = 1
    drafters: int = 1
    drafter_failures: Failures = NEVER
    verifier_failures: Failures = NEVER

    def serving(self, pod: int) -> list[int]:
        """Numbers of a pod's drafters."""
        if self.drafters < self.pods:
            return [pod % self.drafters] if self.drafters else []
        return list(range(pod, self.drafters, self.pods))


MakeLoad = Callable[[np.random.Generator], Load]


def simulate(
    profile: Profile, deployment: Deployment, load: MakeLoad, *, begin: float = 0.0, end: float = inf, seed: int = 0
) -> Figures:
    """Run until all that was asked is answered. What is counted is between `begin` and `end`, in seconds."""
    seeds = np.random.SeedSequence(seed).spawn(4)  # apart, so that each is the same whatever the others are used for
    figures = Figures(begin, end)
    drafters = [Drafter(deployment.drafter_failures, s) for s in seeds[0].spawn(deployment.drafters)]
    verifiers = [Process(deployment.verifier_failures, s) for s in seeds[1].spawn(deployment.pods)]
    choice, draws = Choice(profile), Draws(profile, seeds[2])
    pods = [
        Pod(profile, choice, draws, verifier, [drafters[d] for d in deployment.serving(number)], figures)
        for number, verifier in enumerate(verifiers)
    ]
    _Clock(pods, load(np.random.default_rng(seeds[3])), figures).run()
    return figures


class _Clock:
    def __init__(self, pods: list[Pod], load: Load, figures: Figures) -> None:
        self._pods, self._load, self._figures = pods, load, figures
        self._arrivals = load.arrivals()
        self._events: list[tuple[float, int, Pod | None, Tokens]] = []
        self._order = count()  # of events at the same time
        self._busy: set[Pod] = set()
        self._now, self._streams = 0.0, 0

    def run(self) -> None:
        self._next_arrival()
        while self._events:
            now, _, pod, tokens = heapq.heappop(self._events)
            self._figures.passed(self._now, now, self._streams)
            self._now = now
            if pod is None:
                pod = self._arrive(tokens)
            else:
                self._busy.remove(pod)
                self._end(pod)
            if pod and pod not in self._busy and (then := pod.begin(now)) is not None:
                self._busy.add(pod)
                self._at(then, pod)

    def _at(self, time: float, pod: Pod | None, tokens: Tokens = (0, 0)) -> None:
        heapq.heappush(self._events, (time, next(self._order), pod, tokens))

    def _next_arrival(self) -> None:
        if (found := next(self._arrivals, None)) is not None:
            self._at(found[0], None, found[1])

    def _arrive(self, tokens: Tokens) -> Pod | None:
        """Returns the pod that has it; None: it was refused."""
        self._next_arrival()  # there are none any more when streams ask anew
        prompt, answer = tokens
        pod = self._choose()
        if not pod.take(Stream(self._now, prompt, answer, pending=prompt)):
            self._figures.refuse(self._now)
            return None
        self._streams += 1
        return pod

    def _choose(self) -> Pod:
        pods = self._pods
        if len(pods) == 1:
            return pods[0]
        serving = [pod for pod in pods if pod.verifier.ready(self._now) <= self._now]
        return min(serving or pods, key=lambda pod: pod.load)

    def _end(self, pod: Pod) -> None:
        done = pod.end(self._now)
        self._streams -= done
        for _ in range(done):
            if (tokens := self._load.answered(self._now)) is not None:
                self._at(self._now, None, tokens)
