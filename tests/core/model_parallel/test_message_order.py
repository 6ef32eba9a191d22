"""The messages of pipelines by the rules of NCCL: no two ranks wait for each other."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch

from fedplat.client_state import ClientState
from fedplat.parallel import Parallel
from fedplat.pytorch.distributed import Ranks
from fedplat.pytorch.distributed.bench.measure import choose_pairs, measure_link
from fedplat.pytorch.distributed.exchange import P2PVectors, VectorLayout
from fedplat.pytorch.parallel import Layout, ParallelTrainee, make_gradients
from fedplat.pytorch.parallel.apply import PIPELINE
from fedplat.pytorch.parallel.pipeline import Shape, _Pipeline, find_shapes  # pyright: ignore[reportPrivateUsage]
from fedplat.pytorch.training import MakeOptimizer, check_examples
from fedplat.pytorch.training.learner import make_loss
from fedplat.pytorch.training.stepper import StepAlgorithm, Stepper
from support.model_parallel import piped
from support.model_parallel.piped import Case
from support.ranks.nccl import DeadlockError, Network, make_network

LAYOUTS = [
    "pipeline=3,schedule=gpipe,micro_batches=4",
    "pipeline=3,schedule=1f1b,micro_batches=3",
    "pipeline=4,schedule=1f1b,micro_batches=6",
    "pipeline=2,schedule=interleaved-1f1b,micro_batches=4",
    "pipeline=4,schedule=interleaved-1f1b,micro_batches=4",
    "pipeline=2,schedule=zero-bubble,micro_batches=4",
    "pipeline=4,schedule=zero-bubble,micro_batches=6",
    "pipeline=3,schedule=pipedream",
]


@dataclass(frozen=True)
class Mesh:
    """The place of a rank in a pipeline without another dimension."""

    rank: int
    network: Network

    def get_local_rank(self, name: str) -> int:
        return self.rank if name == PIPELINE else 0

    def get_group(self, name: str) -> Network:
        assert name == PIPELINE
        return self.network


def prepare(made: Network, case: Case) -> list[tuple[Layout, ParallelTrainee]]:
    """Each rank's part of the model, one after the other: making a module is not for threads."""
    parallel = Parallel.from_text(case.layout)
    prepared: list[tuple[Layout, ParallelTrainee]] = []
    for rank in range(made.count):
        with made.as_rank(rank) as ranks:
            place: Any = Layout(parallel, ranks, Mesh(rank, made))  # type: ignore[arg-type]
            learner, plan, _ = piped.make(case)
            trainee = ParallelTrainee(learner, place, plan)
            trainee.load(learner.initial(3), ClientState())
            prepared.append((place, trainee))
    return prepared


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_schedule_and_no_evaluation_has_ranks_that_wait_for_each_other(
    layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(layout=layout, model="sequential", epochs=1)
    made = make_network(Parallel.from_text(layout).pipeline, monkeypatch)
    prepared = prepare(made, case)
    learner, _, dataset = piped.make(case)
    steps = piped.schedule_of(case, len(dataset))

    def train(ranks: Ranks) -> tuple[list[float], dict[str, float]]:
        place, trainee = prepared[ranks.rank]
        gradients = make_gradients(place, piped.SEED)
        algorithm = StepAlgorithm(loss=make_loss(learner))
        sgd: MakeOptimizer = lambda values: torch.optim.SGD(values, piped.RATE)  # noqa: E731
        stepper = Stepper(trainee.parameters(), steps.options, piped.RATE, algorithm, make_optimizer=sgd)
        examples, losses = check_examples(dataset, ranks.device), list[float]()
        for scores in gradients.compute_steps(trainee, stepper, steps, examples):
            stepper.step()
            losses.append(gradients.sum_scores(scores).means()["loss"])
        return losses, trainee.evaluate(examples, 4).means()

    first, *others = made.run(train)
    assert len(first[0]) == steps.num_steps
    assert all(each == first for each in others)


def test_the_last_stage_returns_the_strides_that_pytorch_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its outputs may be a view, as those of a language model are; PyTorch 2.11 refuses other strides."""
    case = Case(layout="pipeline=2,micro_batches=2")
    learner, _, dataset = piped.make(case)
    inputs = dataset.tensors[0][:5]
    made = make_network(2, monkeypatch)
    prepared = prepare(made, case)

    def find(ranks: Ranks) -> list[Shape]:
        return find_shapes(prepared[ranks.rank][1], inputs if ranks.is_first else None, nullcontext)

    shapes, others = made.run(find)
    assert shapes == others
    expected = learner.model()(inputs)
    assert not expected.is_contiguous()
    assert (shapes[-1].empty("cpu").shape, shapes[-1].empty("cpu").stride()) == (expected.shape, expected.stride())
    assert shapes[1].empty("cpu").is_contiguous()


def test_the_first_messages_of_a_stage_are_for_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch 2.11 begins with them. Two stages of a rank that follow each other need none, and Gloo refuses."""
    case = Case(layout="pipeline=2,schedule=zero-bubble,micro_batches=2", model="sequential")
    made = make_network(2, monkeypatch)
    shapes = [Shape([2, 12], [12, 1], "float32")] * 5
    for rank, (_, trainee) in enumerate(prepare(made, case)):
        with made.as_rank(rank):
            pipeline = _Pipeline(trainee, cast(Any, None), shapes, None)
            for stage in pipeline._stages:  # pyright: ignore[reportPrivateUsage]
                peers = [each.group_peer for each in stage._get_init_p2p_neighbors_ops()]  # pyright: ignore[reportPrivateUsage]
                assert peers == [1 - rank] * 2, "both directions, with the only neighbour on another rank"


def test_links_are_measured_before_any_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    links = make_network(3, monkeypatch).run(
        lambda ranks: [measure_link(ranks, pair, 64) for pair in choose_pairs(ranks)]
    )
    assert [(each.sender, each.receiver) for each in links[0]] == [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]


def test_sums_of_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    def add(ranks: Ranks) -> list[float]:
        with P2PVectors(ranks, VectorLayout(4, (0, 5, 6, 13)), length=2) as vectors:
            for logical, vector in vectors.own.items():
                vector += logical + 1
            return vectors.all_reduce().tolist()

    assert make_network(3, monkeypatch).run(add) == [[10.0] * 13] * 3


def test_a_deadlock_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both send first, as two neighbours must not."""

    def cross(ranks: Ranks) -> None:
        values = torch.zeros(1)
        sent = torch.distributed.isend(values, group_dst=1 - ranks.rank)
        torch.distributed.recv(values, group_src=1 - ranks.rank)
        assert sent is not None
        sent.wait()

    with pytest.raises(DeadlockError, match=r"^rank 0: receive 1 on 0 and 1; rank 1: receive 0 on 0 and 1$"):
        make_network(2, monkeypatch).run(cross)
