"""Which pod a request goes to: the one that most likely holds the KV rows of its prompt's beginning, unless it is far busier.

Pods keep complete pages under keys that stand for all tokens up to their end (verifier/pages.py). The same keys are remembered
here, each with the pod that was last sent a prompt with it. What is new goes to the pod with least to do; between equals a hash
of the prompt's first page decides, so that all who choose agree. Pure policy: knows no Ray.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from hashlib import blake2b

from ddtree.verifier.pages import page_keys

REMEMBERED = 1 << 16  # pages
BUSIER, SLACK = 2, 4  # affinity holds up to BUSIER times the requests of the idlest pod, and SLACK more


class Affinity:
    """What one sender knows of the pods' prefix caches."""

    def __init__(self, page_size: int, remembered: int = REMEMBERED) -> None:
        """`page_size`: tokens, as the pods have it. `remembered`: pages; those sent longest ago are forgotten."""
        self._page_size, self._remembered = page_size, remembered
        self._pod_of: OrderedDict[bytes, str] = OrderedDict()

    def choose(self, prompt: Sequence[int], load: Mapping[str, int]) -> str:
        """The pod for a prompt. `load`: requests that each pod has, running and waiting; at least one pod."""
        first = array("q", prompt[: self._page_size]).tobytes()
        idlest = min(load, key=lambda pod: (load[pod], blake2b(first + pod.encode(), digest_size=8).digest()))
        sent = (self._pod_of.get(key) for key in reversed(page_keys(prompt, self._page_size)))
        holder = next((pod for pod in sent if pod is not None and pod in load), idlest)
        return holder if load[holder] <= BUSIER * load[idlest] + SLACK else idlest

    def sent(self, prompt: Sequence[int], pod: str) -> None:
        """A prompt went to this pod, whose cache now gets its pages."""
        for key in page_keys(prompt, self._page_size):
            self._pod_of[key] = pod
            self._pod_of.move_to_end(key)
        while len(self._pod_of) > self._remembered:
            self._pod_of.popitem(last=False)
