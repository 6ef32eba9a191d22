"""Plan a private job: epsilon by rounds, cohort and noise, before training.

Like the job's own accounting it requires the extra `privacy`; a plan takes some seconds. The figures of the job itself
are those that a server computes. Other cohorts and other noise are computed with less precision (`losses.ROUGH`): these
are upper bounds too, and differ from a server's by at most 1 %, mostly by less than 0.1 %.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Protocol, TypeVar

from msgspec import Struct, structs

from fedplat.config.toml import normalize
from fedplat.errors import JobFileError
from fedplat.job import secure
from fedplat.job.privacy import build_mechanism, calibrate, find_mechanism
from fedplat.job.spec import JobSpec
from fedplat.privacy import Charge, Mechanism, Privacy, accounting
from fedplat.privacy.accounting import epsilon, epsilon_rdp, epsilons, max_releases
from fedplat.privacy.losses import FINE, ROUGH, Precision
from fedplat.privacy.options import describe_adjacency
from fedplat.sampling import Poisson

PARTS_OF_ROUNDS = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0)
FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
MAX_ROUNDS = 1_000_000
MAX_ROUNDS_FACTOR = 100
"""Factor that bounds the rounds of an alternative, relative to those of the job."""
CURVE_POINTS = 24

Row = TypeVar("Row")


class MapFunction(Protocol):
    """A `map` function: the builtin one, or that of a process pool."""

    def __call__(
        self, function: Callable[[Callable[[], Row]], Row], tasks: Sequence[Callable[[], Row]], /
    ) -> Iterable[Row]:
        """Return the function's result for each task, in their order."""
        ...


class Rounds(Struct, frozen=True, kw_only=True):
    """Epsilon after a number of rounds, by privacy loss distributions and by Rényi divergences.

    If clients add the noise, both are by Rényi divergences, and a round has the fewest survivors that it may have.
    """

    rounds: int
    epsilon: float
    epsilon_rdp: float


class CohortCost(Struct, frozen=True, kw_only=True):
    """The noise that a number of expected reports needs for the epsilon of the plan.

    `noise_multiplier` is None if no noise is enough. `deviation` is that of the noise in each entry of the mean update,
    in units of the clip norm. If clients add the noise, it is that of a round without drop-outs.
    """

    expected_reports: int
    sampling_probability: float
    separation: int
    noise_multiplier: float | None
    deviation: float | None


class NoiseCost(Struct, frozen=True, kw_only=True):
    """The cost of a noise multiplier in the job's rounds.

    `max_rounds` is the number of rounds that the epsilon of the plan allows, at most a hundred times the job's. For
    noise that was calibrated for the job it is the number of rounds for which it was.
    """

    noise_multiplier: float
    epsilon: float
    max_rounds: int
    deviation: float


class PrivacyPlan(Struct, frozen=True, kw_only=True):
    """The plan of a private job before its submission. `num_clients` is 0 if it is unknown.

    `budget` is the epsilon at which alternatives are compared: the job's, or the epsilon of its noise.
    """

    job: str
    population: str
    rounds: int
    max_rounds: int
    delta: float
    budget: float
    calibrated: bool
    mechanism: Mechanism
    adjacency: str
    num_clients: int
    expected_reports: int
    noise_multiplier: float
    deviation: float
    by_rounds: tuple[Rounds, ...]
    by_cohort: tuple[CohortCost, ...]
    by_noise: tuple[NoiseCost, ...]
    remarks: tuple[str, ...]


def require_privacy(spec: JobSpec) -> Privacy:
    """Return the privacy options of a job. Raises `JobFileError` if it has none."""
    if spec.privacy is None:
        raise JobFileError(
            "privacy: the job has no such table, so its clients have no guarantee; expected [privacy] with "
            "participation, delta and epsilon or noise_multiplier, or [config] dp for the privacy of single examples"
        )
    return spec.privacy


def plan(
    spec: JobSpec,
    num_clients: int = 0,
    multipliers: Sequence[float] = (),
    progress: Callable[[int, int], object] = lambda done, total: None,
    run: MapFunction = map,
) -> PrivacyPlan:
    """Return the plan of a job; `multipliers` are compared instead of some around the job's own.

    `progress` is called with the number of computed rows, and of all rows. `run` computes the rows of other cohorts and
    other noise, possibly in other processes, while this process computes the job's own.

    Raises `JobFileError` for a job that cannot keep its privacy guarantee, and `MissingExtraError`.
    """
    spec = normalize(spec)
    options = require_privacy(spec)
    num_clients = num_clients or _population(spec)
    budget = options.epsilon or epsilon([Charge(_mechanism(spec), spec.rounds)], options.delta)
    own_goal, goals = spec.selection.goal, [goal for goal in _goals(spec) if goal <= (num_clients or goal)]
    # Other processes begin with these rows, because the calibration of the job's own noise takes seconds.
    cohorts = iter(
        run(_call, [partial(_cohort, spec, goal, budget, num_clients) for goal in goals if goal != own_goal])
    )
    calibrated = calibrate(spec)
    mechanism, found = _mechanism(calibrated), require_privacy(calibrated)
    assert found.noise_multiplier is not None
    assert found.max_releases is not None
    own_noise, chosen = found.noise_multiplier, multipliers or _around(found.noise_multiplier)
    noises = iter(run(_call, [partial(_noise, spec, each, budget) for each in chosen if each != own_noise]))
    counts = _counts(spec.rounds, found.max_releases)
    done, total = itertools.count(1), len(counts) + len(goals) + len(chosen)

    def advance(row: Row) -> Row:
        progress(next(done), total)
        return row

    progress(0, total)
    # The job's own rows share costs that are cached in this process.
    by_rounds = tuple(advance(_rounds(mechanism, options.delta, count)) for count in counts)
    by_cohort = tuple(
        advance(_cohort(calibrated, goal, budget, num_clients, FINE) if goal == own_goal else next(cohorts))
        for goal in goals
    )
    known = found.max_releases if options.noise_multiplier is None else None
    by_noise = tuple(
        advance(_noise(spec, each, budget, FINE, known) if each == own_noise else next(noises)) for each in chosen
    )
    return PrivacyPlan(
        job=spec.name,
        population=spec.population,
        rounds=spec.rounds,
        max_rounds=found.max_releases,
        delta=options.delta,
        budget=budget,
        calibrated=options.noise_multiplier is None,
        mechanism=mechanism,
        adjacency=describe_adjacency(mechanism),
        num_clients=num_clients,
        expected_reports=spec.selection.goal,
        noise_multiplier=own_noise,
        deviation=_deviation(spec, own_noise, own_goal),
        by_rounds=by_rounds,
        by_cohort=by_cohort,
        by_noise=by_noise,
        remarks=tuple(_remarks(spec, num_clients)),
    )


def _call(task: Callable[[], Row]) -> Row:
    return task()


def _mechanism(spec: JobSpec) -> Mechanism:
    """Return the mechanism of a private job; if its noise is not calibrated yet, with a multiplier of 1."""
    return find_mechanism(spec) or build_mechanism(spec, 1.0)


def _around(multiplier: float) -> list[float]:
    return [float(f"{multiplier * factor:.4g}") for factor in FACTORS]


def _noise(
    spec: JobSpec, multiplier: float, budget: float, precision: Precision = ROUGH, known: int | None = None
) -> NoiseCost:
    """Return the cost of a `privacy.noise_multiplier` in a job; `known` are the rounds that the budget allows."""
    options, limit = require_privacy(spec), min(MAX_ROUNDS, MAX_ROUNDS_FACTOR * spec.rounds)
    mechanism = build_mechanism(spec, options.total_multiplier(multiplier))
    return NoiseCost(
        noise_multiplier=multiplier,
        epsilon=epsilon([Charge(mechanism, spec.rounds)], options.delta, precision),
        max_rounds=known or max_releases(mechanism, budget, options.delta, limit, precision=precision),
        deviation=_deviation(spec, multiplier, spec.selection.goal),
    )


def curve(spec: JobSpec, multiplier: float) -> tuple[list[int], list[float]]:
    """Return numbers of rounds, evenly spaced on a logarithmic scale, and epsilon after each; for a plot."""
    options, last = require_privacy(spec), 4 * spec.rounds
    counts = sorted({round(last ** (step / (CURVE_POINTS - 1))) for step in range(CURVE_POINTS)})
    return counts, epsilons(build_mechanism(spec, options.total_multiplier(multiplier)), counts, options.delta, ROUGH)


def with_noise(spec: JobSpec, multiplier: float) -> JobSpec:
    """Return the job with this noise and without a budget. Raises `ValueError` if the noise contradicts its options."""
    options = structs.replace(require_privacy(spec), noise_multiplier=multiplier, epsilon=None, max_releases=None)
    return structs.replace(spec, privacy=options)


def _population(spec: JobSpec) -> int:
    sampling = spec.selection.sampling
    return round(spec.selection.goal / sampling.rate) if isinstance(sampling, Poisson) else 0


def _counts(rounds: int, most: int) -> list[int]:
    counts = {min(MAX_ROUNDS, max(1, round(part * rounds))) for part in PARTS_OF_ROUNDS}
    return sorted(counts | ({most} if most else set()))


def _rounds(mechanism: Mechanism, delta: float, count: int) -> Rounds:
    charges = [Charge(mechanism, count)]
    return Rounds(rounds=count, epsilon=epsilon(charges, delta), epsilon_rdp=epsilon_rdp(charges, delta))


def _goals(spec: JobSpec) -> list[int]:
    return sorted({max(1, round(factor * spec.selection.goal)) for factor in FACTORS})


def _cohort(spec: JobSpec, goal: int, budget: float, num_clients: int, precision: Precision = ROUGH) -> CohortCost:
    """Return the noise that a job requires with another `selection.goal`."""
    options, mechanism = require_privacy(spec), _mechanism(spec)
    if mechanism.kind == "poisson":
        rate = min(1.0, goal / num_clients)
        mechanism = structs.replace(
            mechanism,
            sampling_probability=rate,
            overflow=min(1.0, mechanism.overflow * mechanism.sampling_probability / rate),
        )
    elif mechanism.separation > 1 and num_clients:
        # the number of consecutive rounds in which a client takes part once, if all clients take turns
        mechanism = structs.replace(
            mechanism, separation=max(1, num_clients // structs.replace(spec.selection, goal=goal).target)
        )
    is_own = goal == spec.selection.goal
    try:
        if is_own and options.epsilon is None:
            multiplier = options.noise_multiplier  # the budget is the epsilon of this noise
        else:
            whole = accounting.calibrate(mechanism, spec.rounds, budget, options.delta, precision).noise_multiplier
            multiplier = options.model_multiplier(whole)
    except ValueError:
        multiplier = None
    return CohortCost(
        expected_reports=goal,
        sampling_probability=mechanism.sampling_probability,
        separation=mechanism.separation,
        noise_multiplier=multiplier,
        deviation=None if multiplier is None else _deviation(spec, multiplier, goal),
    )


def _deviation(spec: JobSpec, multiplier: float, goal: int) -> float:
    """Return the deviation of the noise in each entry of a mean of `goal` reports, in units of the clip norm."""
    options = require_privacy(spec)
    if options.trust == "none":
        multiplier *= secure.noise_surplus(spec, goal)
    return multiplier / (goal * options.expected_weight)


def _remarks(spec: JobSpec, num_clients: int) -> Iterator[str]:
    selection = spec.selection
    if not num_clients:
        return
    if isinstance(selection.sampling, Poisson):
        drawn = selection.sampling.rate * num_clients
        if not 0.8 <= drawn / selection.goal <= 1.25:
            yield (
                f"{drawn:,.1f} of {num_clients:,} clients are drawn per round, but their sum is divided by "
                f"selection.goal = {selection.goal}; expected selection.sampling.rate near "
                f"{min(1.0, selection.goal / num_clients):.3g}"
            )
        return
    needed = (selection.min_separation + 1) * selection.target
    if needed > num_clients:
        yield (
            f"{num_clients:,} clients are too few: with selection.min_separation = {selection.min_separation} and "
            f"{selection.target} assignments per round, {needed:,} are needed; rounds will wait or have fewer clients"
        )
