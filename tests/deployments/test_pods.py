"""More than one pod, and a service that is deployed anew under load: no request fails, no token changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ddtree.deployments.affinity import BUSIER, SLACK, Affinity
from ddtree.deployments.commands.plan import make_plan
from ddtree.deployments.config import AppConfig
from ddtree.deployments.errors import ConfigError
from ddtree.deployments.pods import Pod, count, home

from ..conftest import REPOSITORY

PAGE = 4
SYSTEM, QUESTION = [1, 2, 3, 4, 5, 6, 7, 8], [9, 10, 11, 12]
IDLE = {"a": 0, "b": 0, "c": 0}


def test_a_prompt_goes_where_its_longest_beginning_went() -> None:
    affinity = Affinity(PAGE)
    affinity.sent(SYSTEM, "a")
    affinity.sent([*SYSTEM, *QUESTION], "b")
    assert affinity.choose([*SYSTEM, 40, 41, 42, 43, 44], IDLE) == "b", "the last one to be sent it"
    affinity.sent(SYSTEM, "a")
    assert affinity.choose([*SYSTEM, 40, 41, 42, 43, 44], IDLE) == "a"
    assert affinity.choose([*SYSTEM, *QUESTION, 50], IDLE) == "b", "the longer one counts"
    assert affinity.choose([*SYSTEM, *QUESTION, 50], {"a": 0, "c": 0}) == "a", "b is gone"


def test_load_goes_before_affinity_where_it_is_uneven() -> None:
    affinity = Affinity(PAGE)
    affinity.sent(SYSTEM, "a")
    assert affinity.choose(SYSTEM, {"a": SLACK, "b": 0}) == "a"
    assert affinity.choose(SYSTEM, {"a": SLACK + 1, "b": 0}) == "b"
    assert affinity.choose(SYSTEM, {"a": BUSIER * 10 + SLACK, "b": 10}) == "a"
    assert affinity.choose(SYSTEM, {"a": BUSIER * 10 + SLACK + 1, "b": 10}) == "b"


def test_what_is_new_goes_to_the_idlest_and_spreads() -> None:
    affinity = Affinity(PAGE)
    assert affinity.choose([7, 7], {"a": 2, "b": 1, "c": 3}) == "b"
    drawn = [affinity.choose([i, i], IDLE) for i in range(300)]
    assert all(drawn.count(pod) > 60 for pod in IDLE), "of equals, as the prompt falls"
    assert drawn == [Affinity(PAGE).choose([i, i], dict(reversed(IDLE.items()))) for i in range(300)], (
        "all senders agree"
    )


def test_the_oldest_is_forgotten() -> None:
    affinity = Affinity(PAGE, remembered=2)
    elsewhere = next(pod for pod in IDLE if pod != affinity.choose(QUESTION, IDLE))
    affinity.sent(QUESTION, elsewhere)
    assert affinity.choose(QUESTION, IDLE) == elsewhere
    affinity.sent(SYSTEM, "a")
    assert affinity.choose(QUESTION, IDLE) != elsewhere


def test_drafters_are_dealt_out_evenly_and_near() -> None:
    pods = [Pod(number, node, None) for number, node in ((2, "x"), (0, "x"), (1, "y"))]
    assert [home(pods, i, "x") for i in range(4)] == [pods[1], pods[0], pods[1], pods[0]]
    assert home(pods, 5, "y") == pods[2]
    assert [home(pods, i, "z") for i in range(3)] == [pods[1], pods[2], pods[0]]
    assert home([], 0, "x") is None


@pytest.mark.parametrize(
    ("replicas", "says"),
    [
        ({"Router": 2}, r"num_replicas of Router \(2\) and Verifier \(1\) differ"),
        ({"Router": 1, "Verifier": 3}, r"Router \(1\) and Verifier \(3\) differ"),
        ({"Router": 2, "Verifier": 2}, "1 drafters for 2 pods; a drafter serves one pod"),
        ({"Router": 2, "Verifier": 2, "Drafter": 1}, "give Drafter a num_replicas"),
    ],
)
def test_numbers_of_replicas_that_make_no_pods(replicas: dict[str, int], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        count(document(replicas), "file")


def test_pods_are_counted_and_do_not_autoscale() -> None:
    assert count(document({}), "file") == 1
    assert count(document({"Router": 3, "Verifier": 3, "Drafter": 5}), "file") == 3
    assert count(document({"Router": 2, "Verifier": 2}), "file", drafting=False) == 2
    for scaled in ({"autoscaling_config": {"max_replicas": 2}}, {"num_replicas": "auto"}):
        with pytest.raises(ConfigError, match="pods do not scale by themselves"):
            count({"applications": [{"deployments": [{"name": "Verifier", **scaled}]}]}, "file")
    assert count({"applications": [{"deployments": [{"name": "Drafter", "num_replicas": "auto"}]}]}, "file") == 1


def test_a_plan_says_what_each_pod_needs(tmp_path: Path) -> None:
    text = (REPOSITORY / "configs/smollm2-cpu.yaml").read_text()
    pods = "".join(f"      - {{name: {name}, num_replicas: 2}}\n" for name in ("Router", "Verifier", "Drafter"))
    path = tmp_path / "two.yaml"
    path.write_text(text[: text.index("      - name: Drafter")] + pods)
    one, two = make_plan(REPOSITORY / "configs/smollm2-cpu.yaml"), make_plan(path)
    assert (one.pods, two.pods) == (1, 2) and one.memory == two.memory
    assert two.hardware.startswith("is 2 pods, each of which needs a machine with")
    assert any("of one pod" in note for note in two.notes) and not any("of one pod" in note for note in one.notes)
    path.write_text(text + "      - {name: Router, num_replicas: 2}\n")
    with pytest.raises(ConfigError, match="differ"):
        make_plan(path)


@pytest.mark.parametrize(
    ("user_config", "says"),
    [
        ({"budget": 64}, r"tree.budget \(64\) is above tree.max_budget \(63\)"),
        ({"budget": -1}, "'tree.budget' = -1"),
        ({"top_k": 3}, "unknown key 'top_k'; valid is budget"),
        ([3], "must be a mapping such as {budget: 16}"),
    ],
)
def test_a_budget_that_makes_no_sense(user_config: Any, says: str) -> None:
    config = AppConfig.parse({"target": {"model": "m"}, "tree": {"budget": 5}})
    with pytest.raises(ConfigError, match=says):
        config.default_budget(user_config)
    assert config.default_budget(None) == 5 and config.default_budget({"budget": 63}) == 63


def document(replicas: dict[str, int]) -> dict[str, Any]:
    return {"applications": [{"deployments": [{"name": n, "num_replicas": number} for n, number in replicas.items()]}]}
