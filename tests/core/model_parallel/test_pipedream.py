"""PipeDream: the recurrence of the paper, on ranks that have a stage each and on one process."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from fedplat.parallel import Parallel
from fedplat.pytorch.distributed import Ranks
from fedplat.pytorch.training import StepSchedule
from support.model_parallel import piped, pipedream
from support.ranks.backends import bound, if_on_gpus
from support.ranks.group import RankError, RankGroup, Zygote

HERE = "support.model_parallel.pipedream"
STAGE_OF_LAYER = {1: (0, 0, 0), 2: (0, 1, 1), 3: (0, 1, 2)}
Arrays = dict[str, npt.NDArray[np.float64]]


@dataclass(frozen=True)
class Stages:
    """A group of ranks with a stage each."""

    count: int
    backend: str
    group: RankGroup

    def compare(self, found: dict[str, Any], in_turn: dict[str, Any]) -> None:
        """Compare rank 0 with one process that has all stages; the bits of CPUs are the same."""
        assert found["losses"] == pytest.approx(in_turn["losses"], rel=bound(self.backend, 1e-6))
        if self.backend == "gloo":
            assert (found["losses"], found["digest"]) == (in_turn["losses"], in_turn["digest"])


@pytest.fixture(
    scope="module",
    params=[
        (2, "gloo"),
        pytest.param((3, "gloo"), marks=pytest.mark.slow),
        *if_on_gpus((2, "nccl"), 2),
    ],
)
def stages(request: pytest.FixtureRequest, zygote: Zygote) -> Generator[Stages]:
    """A stage on each of some ranks."""
    count, backend = request.param
    with zygote.group(count, BACKEND=backend) as group:
        yield Stages(count, backend, group)


@pytest.fixture
def alone(request: pytest.FixtureRequest) -> Generator[Ranks]:
    """This process, as a group of its own, which computes where the stages do."""
    backend = request.getfixturevalue("stages").backend if "stages" in request.fixturenames else "gloo"
    with piped.alone(backend) as ranks:
        yield ranks


def gradient(weights: Arrays, inputs: npt.NDArray[np.float64], targets: npt.NDArray[np.float64]) -> Arrays:
    """The gradient of the mean squared error of three linear layers."""
    values = [inputs]
    for layer in range(3):
        values.append(values[-1] @ weights[f"{layer}.weight"].T + weights[f"{layer}.bias"])
    slope = 2 * (values[-1] - targets) / targets.size
    found: Arrays = {}
    for layer in (2, 1, 0):
        found[f"{layer}.weight"], found[f"{layer}.bias"] = slope.T @ values[layer], slope.sum(0)
        slope = slope @ weights[f"{layer}.weight"]
    return found


def recurrence(num_stages: int, drain_every: int = 0) -> Arrays:
    """w(t+1) = w(t) - rate * gradient of f(w_1(t-n+1), ..., w_n(t)); no version is older than the last drain."""
    inputs, targets = (tensor.double().numpy() for tensor in pipedream.points().tensors)
    first = pipedream.LINEAR.initial(1)
    versions: list[Arrays] = [{name: first[name].astype(np.float64) for name in first}]
    plan = StepSchedule(num_examples=len(inputs), options=pipedream.OPTIONS, seed=pipedream.SEED)
    for t, batch in enumerate(plan.steps()):
        drained = t // drain_every * drain_every if drain_every else 0
        used: Arrays = {}
        for name in versions[0]:
            delay = num_stages - 1 - STAGE_OF_LAYER[num_stages][int(name[0])]
            used[name] = versions[max(drained, t - delay)][name]
        slope = gradient(used, inputs[batch], targets[batch])
        versions.append({name: value - pipedream.RATE * slope[name] for name, value in versions[-1].items()})
    return versions[-1]


def assert_weights(found: dict[str, Any], expected: Arrays) -> None:
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=0, atol=1e-6, err_msg=name)


def test_weights_are_those_of_the_recurrence(stages: Stages, alone: Ranks) -> None:
    count = stages.count
    for drain_every in (0, 4):
        expected = recurrence(count, drain_every)
        found = stages.group.call(f"{HERE}:train_layers", num_stages=count, drain_every=drain_every)
        assert_weights(found[0]["weights"], expected)
        # Each rank has the same losses, and one process that has all stages the same bits.
        in_turn = pipedream.train_layers(alone, count, drain_every=drain_every)
        assert [each["losses"] for each in found] == [found[0]["losses"]] * count
        stages.compare(found[0], in_turn)
        # Stage i of n, counted from 1, keeps n - i + 1 versions.
        versions = {int(stage): number for each in found for stage, number in each["versions"].items()}
        assert versions == in_turn["versions"] == {stage: count - stage for stage in range(count)}
    plain = recurrence(1)
    assert max(np.abs(recurrence(count)[name] - plain[name]).max() for name in plain) > 1e-3


def test_a_random_model_has_the_same_bits_in_turn_and_after_a_resume(stages: Stages, alone: Ranks) -> None:
    on_ranks = stages.group.call(f"{HERE}:resume", num_stages=stages.count)[0]
    assert on_ranks[0] == on_ranks[1]
    if stages.backend == "gloo":
        assert on_ranks == pipedream.resume(alone, stages.count)


def test_a_llama_learns(stages: Stages, alone: Ranks) -> None:
    found = stages.group.call(f"{HERE}:train_llama", num_stages=stages.count)[0]
    assert found["losses"][-1] < 0.9 * found["losses"][0]
    stages.compare(found, pipedream.train_llama(alone, stages.count))


def test_options_without_a_meaning_are_refused(stages: Stages) -> None:
    for said in stages.group.call(f"{HERE}:refuse", num_stages=stages.count):
        assert [text.partition(" ")[0].rstrip(":") for text in said] == ["max_grad_norm", "accumulate", "precision"]


def test_one_stage_is_plain_sgd(alone: Ranks) -> None:
    found = pipedream.train_layers(alone, 1)
    assert found["versions"] == {0: 1}
    assert_weights(found["weights"], recurrence(1))
    module = pipedream.LINEAR.make()
    model = pipedream.LINEAR.initial(1)
    module.load_state_dict({name: torch.from_numpy(model[name].copy()) for name in model})
    optimizer = torch.optim.SGD(module.parameters(), pipedream.RATE)
    inputs, targets = pipedream.points().tensors
    plan = StepSchedule(num_examples=len(inputs), options=pipedream.OPTIONS, seed=pipedream.SEED)
    for batch in plan.steps():
        optimizer.zero_grad()
        pipedream.LINEAR.loss(module(inputs[batch]), targets[batch]).backward()
        optimizer.step()
    for name, value in module.state_dict().items():
        assert value.tolist() == found["weights"][name]


def test_a_failing_stage_ends_all_ranks(zygote: Zygote) -> None:
    with zygote.group(2) as group:
        group.begin(f"{HERE}:fail", num_stages=2)
        with pytest.raises(RankError, match="gone"):
            group.result(1)
        assert group.result(0) == "RuntimeError"


@pytest.mark.slow
@pytest.mark.fault("F35")
def test_a_killed_pool_resumes_with_the_same_bits(zygote: Zygote, alone: Ranks, tmp_path: Path) -> None:
    with zygote.group(2) as group:
        whole = group.call(f"{HERE}:train_in_pool")[0]
        assert whole["done"] == list(range(1, 13))
        group.begin(f"{HERE}:train_in_pool", folder=str(tmp_path), kill_at=6)
        for rank in range(2):
            with pytest.raises(RankError, match="gone"):
                group.result(rank)
    again = pipedream.train_in_pool(alone, str(tmp_path))  # on one process instead of two
    assert again["done"] == list(range(5, 13))
    assert again["digest"] == whole["digest"]
    assert again["losses"] == whole["losses"]


@pytest.mark.parametrize("changes", [{"micro_batches": 4}, {"data": 2}, {"offload": "cpu"}, {"recompute": "blocks"}])
def test_layouts_that_pipedream_does_not_have_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match='schedule = "pipedream"'):
        Parallel(pipeline=2, schedule="pipedream", **changes)
