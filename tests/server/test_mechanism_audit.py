"""The claimed noise multiplier, measured on the daemon's own aggregation: some 2,000 attempts, and the audit's audit.

The daemon's noise comes from the operating system, so every run of these tests measures anew. The noise multipliers
are small, so that what one client changes shows after a few runs. The standard error of a measured multiplier is 0.2 %
to 0.45 % of it (the noise: 79,200 numbers, or 396 of a tenth's weight for the count of adaptive clipping; the mean:
multiplier x (2 / runs)^(1/2)). So the tolerance, -3 % and +5 %, is more than six standard errors wide on either side:
a false alarm is rarer than 1e-9.
"""

from __future__ import annotations

import dataclasses
import math
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from fedplat import report_validation
from fedplat.aggregate import Partial, Rule, State, Wrapper, clipping
from fedplat.aggregate.clipping import Release
from fedplat.job import JobSpec, parse_job
from fedplat.model import Parameters, Vector
from fedplat.model.file import FilePart
from fedplat.privacy import Noise
from fedplat.rounds import JobState, Verdict
from fedplat.rounds.events import AggregationFailed, AttemptAggregated
from fedplat.rounds.states import Reason
from support.audit import CLIP, SENT, Audit, Daemon, audit, base_model, claimed, daemon, drop_outs, entries

MULTIPLIER = 0.01
GOAL = 4
LOWEST, HIGHEST = 0.97, 1.05
RUNS = 100
UNIFORM = f'weighting = "uniform"\nclip_norm = {CLIP}'
EXAMPLES = f'weighting = "examples"\nmax_examples = 50\nclip_norm = {CLIP}'
ADAPTIVE = f'weighting = "uniform"\nadaptive_clip = {{ initial_norm = {CLIP}, learning_rate = 0.5 }}'
COUNT_NOISE = MULTIPLIER / (2 * math.sqrt(0.1))
"""With it the count is a tenth of what a release tells: (2 x this)^-2 = 0.1 z^-2."""
SELECTIONS = {
    "poisson": 'wait_for = 40\nsampling = { policy = "poisson", rate = 0.1 }',
    "fixed": "",
    "min_separation": "min_separation = 3",
}


def job(participation: str, updates: str, more: str = "", rounds: int = 1) -> JobSpec:
    return parse_job(
        f'name = "audited"\npopulation = "p"\ntrainer = "t"\nrounds = {rounds}\n[model]\ninitial = "m.safetensors"\n'
        f'[selection]\ngoal = {GOAL}\nclose = "deadline"\n{SELECTIONS[participation]}\n[updates]\n{updates}\n'
        f'[privacy]\nparticipation = "{participation}"\ndelta = 1e-5\nnoise_multiplier = {MULTIPLIER}\n{more}\n'
    )


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """In memory where there is such a place: every release is synced, and thousands are made."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as name:
        yield Path(name)


def holds(found: Audit, promised: float) -> bool:
    """Whether nothing that the client sends tells more than is promised, nor the worst much less."""
    ratios = [found.multiplier(sender) / promised for sender in SENT]
    return min(ratios) >= LOWEST and min(ratios) <= HIGHEST


@pytest.mark.slow
@pytest.mark.parametrize(
    ("participation", "updates", "more", "weight"),
    [
        ("poisson", UNIFORM, "", 1.0),
        ("fixed", EXAMPLES, "expected_weight = 0.5", 0.5),
        ("poisson", ADAPTIVE, f"count_noise = {COUNT_NOISE}", 1.0),
    ],
    ids=["poisson", "fixed, uneven weights", "poisson, adaptive clipping"],
)
async def test_the_noise_over_what_one_client_changes_is_the_claimed_multiplier(
    folder: Path, participation: str, updates: str, more: str, weight: float
) -> None:
    spec = job(participation, updates, more)
    async with daemon(folder, spec) as running:
        found = await audit(running, drop_outs(RUNS))
    assert holds(found, claimed(spec, 1))
    for sender in ("the norm", "against the others", "far too much"):
        assert LOWEST <= found.multiplier(sender) / MULTIPLIER <= HIGHEST, sender
    assert found.multiplier("zeros") > 2 * MULTIPLIER
    moved = {sender: values[0] * GOAL * weight / CLIP for sender, values in found.moved.items()}
    assert moved == pytest.approx(
        {"zeros": 0.0, "the norm": 1.0, "against the others": -1.0, "far too much": 1.0}, abs=0.02
    )
    by_type = [np.square(found.noise[:, part]).mean() ** 0.5 for part in (slice(100), slice(100, 150), slice(150, 200))]
    assert by_type == pytest.approx([found.deviations[0]] * 3, rel=0.04)


@pytest.mark.slow
async def test_a_tree_has_the_claimed_noise_in_each_node_and_in_sums_of_rounds(folder: Path) -> None:
    spec = job("min_separation", UNIFORM, rounds=4)
    promised = claimed(spec, 4)
    assert promised == pytest.approx(MULTIPLIER / math.sqrt(3))  # the client is in a node of 1 round, of 2, and of 4
    async with daemon(folder, spec) as running:
        found = await audit(running, drop_outs(RUNS // 2), 4)
    assert holds(found, promised)
    for sender in ("the norm", "against the others", "far too much"):
        assert LOWEST <= found.multiplier(sender) / promised <= HIGHEST, sender
    size = base_model().schema.num_floating
    nodes = found.noise.reshape(len(found.noise), 4, size)
    unit = MULTIPLIER * CLIP / GOAL
    assert np.sqrt(np.square(nodes).mean(axis=(0, 2))) == pytest.approx([unit] * 4, rel=0.03)
    third = nodes[:, 1] + nodes[:, 2]  # model 3 is made of a node of two rounds, and one of one
    assert np.square(third).mean() ** 0.5 == pytest.approx(unit * math.sqrt(2), rel=0.03)
    moved = found.moved["the norm"].reshape(4, size)[:, 0] * GOAL / CLIP
    assert moved == pytest.approx([1.0, 1.0, 0.0, 1.0], abs=0.02)


Lie = Callable[[Release, Partial], Release]


def by_those_who_reported(release: Release, partial: Partial) -> Release:
    """The mean of those who reported, with the noise of as many."""
    return dataclasses.replace(release, expected_weight=max(partial.weight, 1.0))


def by_examples_with_the_noise_of_an_equal_mean(release: Release, partial: Partial) -> Release:
    """Noise of z C / n on a mean by numbers of examples, in which one client may have more than the n-th part."""
    if not partial.num_updates or release.noise_multiplier is None:
        return release
    scaled = release.noise_multiplier * partial.weight / partial.num_updates
    return dataclasses.replace(release, expected_weight=partial.weight, noise_multiplier=scaled)


def lying(lie: Lie) -> Callable[[Release, Noise | None], Wrapper]:
    """The mechanism, but what it divides by, and its noise, follow from who has reported."""
    honest = clipping.privatize

    def privatized(release: Release, noise: Noise | None) -> Wrapper:
        def wrap(inner: Rule) -> Rule:
            def apply(state: State, partial: Partial) -> tuple[Vector, State]:
                return honest(lie(release, partial), noise)(inner).apply(state, partial)

            return dataclasses.replace(honest(release, noise)(inner), apply=apply)

        return wrap

    return privatized


@pytest.mark.parametrize(
    ("lie", "updates"),
    [(by_those_who_reported, UNIFORM), (by_examples_with_the_noise_of_an_equal_mean, EXAMPLES)],
    ids=["number of reports", "numbers of examples"],
)
async def test_the_audit_finds_a_wrong_denominator(
    folder: Path, monkeypatch: pytest.MonkeyPatch, lie: Lie, updates: str
) -> None:
    monkeypatch.setattr(clipping, "privatize", lying(lie))
    spec = job("fixed", updates)
    async with daemon(folder, spec) as running:
        found = await audit(running, drop_outs(RUNS // 4))
        same = await audit(running, [("a", "b", "d")] * (RUNS // 4))
    assert not holds(found, claimed(spec, 1))
    assert not holds(same, claimed(spec, 1))
    assert same.multiplier("against the others") < 0.6 * MULTIPLIER


async def released(running: Daemon, *reports: str) -> AttemptAggregated | AggregationFailed:
    return await running.attempt(JobState("alone", running.spec, running.first), reports)


async def test_what_is_no_number_is_rejected_and_costs_nothing(folder: Path) -> None:
    async with daemon(folder, job("fixed", UNIFORM)) as running:
        for value in (np.nan, np.inf, -np.inf):
            update = base_model()
            update["half"][0, 0] = value
            path = running.receive(f"{value}", update, 1.0)
            base = running.blobs.path(running.first.digest)
            assert report_validation.validate_file(FilePart(path), base, None) == Verdict(Reason.REJECTED_NONFINITE)
            # And had it come that far, nothing would have been released.
            assert isinstance(await released(running, f"{value}"), AggregationFailed)
        ended = await released(running)
        assert isinstance(ended, AttemptAggregated)
        noise = entries(Parameters.open(running.blobs.path(ended.version.digest)))
        assert 0.0 < np.abs(noise).max() < 10 * MULTIPLIER * CLIP / GOAL


async def test_the_same_reports_never_make_the_same_release(folder: Path) -> None:
    async with daemon(folder, job("fixed", UNIFORM)) as running:
        found = [await released(running, "a", "b") for _ in range(2)]
        digests = [each.version.digest for each in found if isinstance(each, AttemptAggregated)]
        assert len(set(digests)) == 2
