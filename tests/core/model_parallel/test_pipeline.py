"""Pipelines against one process that adds up the gradients of the same micro-batches."""

from __future__ import annotations

import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from fedplat.parallel import Parallel
from fedplat.pytorch.parallel import ParallelPlan
from fedplat.pytorch.parallel.divided_module import make_empty
from fedplat.pytorch.parallel.plan import split_stages
from fedplat.pytorch.training.learner import Learner
from support.model_parallel import llama, piped
from support.model_parallel.piped import Case, Measured
from support.polling import PATIENCE_S
from support.ranks.backends import backends
from support.ranks.group import RankError, Zygote

SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "zero-bubble")
LIKE_OTHERS = ("gpipe", "interleaved-1f1b")
"""Each has as many stages on a rank as one of the other schedules: one, and two."""
CASES = {
    **{
        schedule: Case(layout=f"pipeline=2,schedule={schedule},micro_batches=4", batch_size=10)
        for schedule in SCHEDULES
    },
    "accumulate": Case(layout="pipeline=2,micro_batches=2", batch_size=5, accumulate=3),
    "few rows": Case(layout="pipeline=2,micro_batches=8", batch_size=5),
    "fewer than stages": Case(layout="pipeline=2,schedule=interleaved-1f1b,micro_batches=3", model="sequential"),
    "fewer than ranks": Case(layout="pipeline=2,schedule=zero-bubble,micro_batches=1", model="sequential"),
    "frozen": Case(layout="pipeline=2,micro_batches=4", model="frozen"),
    "sequential": Case(layout="pipeline=2,micro_batches=4", model="sequential"),
    "clipped": Case(layout="pipeline=2,schedule=gpipe,micro_batches=3", max_norm=0.3),
    "recompute": Case(layout="pipeline=2,micro_batches=4,recompute=blocks", batch_size=10),
    "dropout": Case(layout="pipeline=2,micro_batches=4", model="dropout"),
    "dropout, gpipe": Case(layout="pipeline=2,schedule=gpipe,micro_batches=4", model="dropout"),
    "dropout, recompute": Case(layout="pipeline=2,micro_batches=4,recompute=blocks", model="dropout"),
    "stubborn": Case(layout="pipeline=2,micro_batches=4", model="stubborn"),
}


@pytest.fixture(scope="module", params=backends(2))
def of_two(request: pytest.FixtureRequest, zygote: Zygote) -> Generator[Measured[str]]:
    """What two ranks have found in all cases."""
    with piped.measure(zygote, 2, request.param, CASES) as found:
        yield found


@pytest.fixture(scope="module", params=backends(4))
def of_four(request: pytest.FixtureRequest, zygote: Zygote) -> Generator[Measured[tuple[str, int]]]:
    """What pipelines of four ranks have found, by schedule and number of micro-batches."""
    cases = {
        (schedule, count): Case(
            layout=f"pipeline=4,schedule={schedule},micro_batches={count}", model="sequential", epochs=1
        )
        for schedule in SCHEDULES
        for count in (8, 16)
    }
    with piped.measure(zygote, 4, request.param, cases) as found:
        yield found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "accumulate", "few rows", "frozen", "sequential", "recompute"])
def test_the_gradients_have_the_bits_of_one_process(of_two: Measured[str], name: str) -> None:
    expected, (first, second) = piped.by_hand(CASES[name]), of_two[name]
    assert first.gradients.keys().isdisjoint(second.gradients)
    gradients = first.gradients | second.gradients
    assert gradients.keys() == expected.gradients.keys()
    if of_two.backend == "gloo":
        assert gradients == expected.gradients
    of_two.compare(name, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["interleaved-1f1b", "zero-bubble", "fewer than stages", "fewer than ranks", "clipped"]
)
def test_other_orders_of_the_sums_are_close(of_two: Measured[str], name: str) -> None:
    of_two.compare(name, piped.by_hand(CASES[name]), rel_of_norms=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name != "stubborn"])
def test_stages_in_turn_have_the_same_bits(of_two: Measured[str], name: str) -> None:
    of_two.compare_with_turns(name, CASES[name])


@pytest.mark.slow
def test_dropout_is_another_one_in_each_micro_batch_and_step(of_two: Measured[str]) -> None:
    [without] = piped.in_turn(msgspec.structs.replace(CASES["dropout"], model="llama"), backend=of_two.backend)
    found = of_two["dropout"][0]
    assert found.losses[0] != pytest.approx(without.losses[0], rel=1e-4)
    for name in ("dropout, gpipe", "dropout, recompute"):
        of_two.compare(name, found)
        assert of_two.backend != "gloo" or of_two[name][0].digest == found.digest


@pytest.mark.slow
def test_a_forward_that_needs_removed_parts_is_refused_on_all_ranks(of_two: Measured[str]) -> None:
    for found in of_two["stubborn"]:
        assert found.error.startswith("stage 0 of 2 cannot compute by itself: Stubborn raises TypeError")
        assert "forward has to skip attributes that are None" in found.error


@pytest.mark.slow
@pytest.mark.parametrize("count", [8, pytest.param(16, marks=pytest.mark.grid)])
def test_the_bubble_is_that_of_the_formula(of_four: Measured[tuple[str, int]], count: int) -> None:
    def bubble(schedule: str) -> float:
        stages = Parallel(pipeline=4, schedule=schedule, micro_batches=count).num_stages  # type: ignore[arg-type]
        return piped.measure_bubble([found.operations for found in of_four[schedule, count]], stages)

    assert bubble("gpipe") == pytest.approx(3 / (count + 3))
    assert bubble("1f1b") == pytest.approx(3 / (count + 3))
    assert bubble("interleaved-1f1b") == pytest.approx(3 / (2 * count + 3))
    # three operations of the same time for each of two stages, and only the forward passes wait at the beginning
    assert bubble("zero-bubble") == pytest.approx(3 / (6 * count + 3))


@pytest.mark.slow
@pytest.mark.parametrize("count", [8, pytest.param(16, marks=pytest.mark.grid)])
def test_few_micro_batches_are_in_flight(of_four: Measured[tuple[str, int]], count: int) -> None:
    for stage, found in enumerate(of_four["gpipe", count]):
        assert piped.highest_in_flight(found.operations) == {stage: count}
    for stage, found in enumerate(of_four["1f1b", count]):
        assert piped.highest_in_flight(found.operations) == {stage: 4 - stage}


@pytest.mark.slow
@pytest.mark.parametrize(
    "schedule", ["1f1b", "zero-bubble", *(pytest.param(one, marks=pytest.mark.grid) for one in LIKE_OTHERS)]
)
def test_an_error_in_one_stage_ends_all_ranks(zygote: Zygote, schedule: str, tmp_path: Path) -> None:
    note, layout = tmp_path / "time", f"pipeline=4,schedule={schedule}"
    with zygote.group(4) as group:
        group.begin("support.model_parallel.piped:end_with_a_failure", layout=layout, note=str(note))
        for rank in range(4):
            with pytest.raises(RankError, match="gone"):
                group.result(rank)
    seconds = time.monotonic() - float(note.read_text())
    print(f"{schedule}: all ranks ended within {seconds:.2f} s")
    assert seconds < PATIENCE_S, "they waited for a time limit, of minutes, instead of the error"


def test_few_micro_batches_are_refused_in_words() -> None:
    with pytest.raises(
        ValueError, match='micro_batches = 3: schedule = "1f1b" needs at least one for each of 4 stages'
    ):
        Parallel(pipeline=4, micro_batches=3)
    assert Parallel(pipeline=4, micro_batches=3, schedule="gpipe").num_micro_batches == 3


class Tied(llama.Llama):
    """The output has the weights of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.output.weight = self.embedding.weight  # type: ignore[union-attr]


class WithScale(llama.Llama):
    """Has a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))


@pytest.mark.parametrize(
    ("model", "stages", "message"),
    [
        (llama.Llama, ("embedding", "layers"), "the plan of Llama has 2 parts in its stages; 4 stages need"),
        (
            llama.Llama,
            ("embedding", "layers.*", "norm"),
            "the values 'output.weight' of Llama are in none of the plan's",
        ),
        (
            llama.Llama,
            (*llama.PLAN.stages, "layers.*.ffn"),
            "are in layers.0 and layers.0.ffn; expected each in exactly",
        ),
        (Tied, llama.PLAN.stages, "the parts 'embedding' and 'output' of Tied share a parameter"),
        (WithScale, llama.PLAN.stages, "the values 'scale' of WithScale are in none of the plan's stages"),
    ],
)
def test_a_plan_that_cannot_work_is_refused(model: Any, stages: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        split_stages(make_empty(Learner(model=model)), ParallelPlan(stages=stages), 4, [0])
