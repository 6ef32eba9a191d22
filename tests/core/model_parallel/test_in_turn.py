"""Layouts that fewer processes compute than they have ranks."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Generator

import msgspec
import pytest

from fedplat.errors import TrainingError
from fedplat.job.tables import WarmStart
from fedplat.parallel import Parallel
from fedplat.pytorch import server
from fedplat.pytorch.parallel import Layout, make_gradients
from fedplat.pytorch.server import TrainingRun
from fedplat.pytorch.server.trainer import find_layout
from support.model_parallel import piped
from support.model_parallel.piped import Case, Measured
from support.model_parallel.pool import TABLE, make_trainer
from support.ranks.backends import backends
from support.ranks.group import Zygote

SHARDED = {
    "shard": Case(layout="shard=2", model="dropout"),
    "accumulate": Case(layout="shard=2", batch_size=5, accumulate=3),
    "data": Case(layout="data=2"),
}
IN_TURN = {
    "pipeline": Case(layout="pipeline=2,shard=2,micro_batches=4", model="dropout", max_norm=0.3, in_turn=True),
    "short": Case(layout="pipeline=2,data=2,micro_batches=2", batch_size=25, in_turn=True),
    "tensor": Case(layout="shard=2,tensor=2", in_turn=True),
}
REFUSED = Case(layout="pipeline=4,schedule=gpipe", in_turn=True)


@pytest.fixture(scope="module", params=backends(2))
def of_two(request: pytest.FixtureRequest, zygote: Zygote) -> Generator[Measured[str]]:
    """What two ranks have found."""
    with piped.measure(zygote, 2, request.param, SHARDED | IN_TURN | {"refused": REFUSED}) as found:
        yield found


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARDED)
def test_shards_in_turn_have_the_bits_of_two_ranks(of_two: Measured[str], name: str) -> None:
    of_two.compare_with_turns(name, SHARDED[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_TURN)
def test_two_processes_compute_the_same_as_one(of_two: Measured[str], name: str) -> None:
    of_two.compare_with_turns(name, IN_TURN[name])


@pytest.mark.parametrize("name", ["short", "tensor"])
def test_one_process_computes_the_gradient_of_the_whole_batch(name: str) -> None:
    case = msgspec.structs.replace(IN_TURN[name], max_norm=0.3)
    [found] = piped.in_turn(case)
    expected = piped.by_hand(case)
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    assert found.norms == pytest.approx(expected.norms, rel=1e-5)
    assert found.evaluation == pytest.approx(expected.evaluation, rel=1e-5)


@pytest.mark.slow
def test_more_processes_than_parts_are_refused(of_two: Measured[str]) -> None:
    for found in of_two["refused"]:
        assert found.error.startswith("2 processes for a layout of 4 ranks with 1 parts; expected one for each rank")


def test_later_steps_can_be_computed_alone() -> None:
    with piped.alone() as ranks:
        layout = Layout(Parallel(shard=2, pipeline=2), ranks, None)
        steps = make_gradients(layout, 7), make_gradients(layout, 7, begin=2)
        plan = piped.schedule_of(Case(layout=""), 26)
        whole, later = (list(each.parts(plan)) for each in steps)  # type: ignore[attr-defined]
    assert [[part.seed for part in step] for step in whole[2:]] == [[part.seed for part in step] for step in later]
    assert len(whole[0]) == 2


@pytest.mark.parametrize("layout", ["shard=2", "pipeline=2"])
def test_fp16_is_refused_in_turn(layout: str) -> None:
    trainer, parallel = make_trainer(), Parallel.from_text(layout)
    options = WarmStart(**TABLE, precision="fp16")  # type: ignore[arg-type]
    work = TrainingRun(options=options, num_ranks=2, parallel=parallel)
    with (
        piped.alone() as ranks,
        pytest.raises(TrainingError, match='precision = "fp16": a model that several ranks divide has no scaled'),
    ):
        server.train(ranks, trainer, trainer.learner.initial(3), work)


def test_a_layout_is_made_once_and_freed_with_its_ranks() -> None:
    with piped.alone() as ranks:
        found = find_layout(ranks, Parallel(shard=2))
        assert found is not None
        assert found.ranks is ranks
        assert find_layout(ranks, Parallel(shard=2)) is found
        assert find_layout(ranks, Parallel(shard=3)) is not found
        kept = weakref.ref(ranks)
    del ranks, found
    gc.collect()
    assert kept() is None
