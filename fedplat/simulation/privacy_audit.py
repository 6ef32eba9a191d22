"""An audit of a private job: one simulated run with canaries, and a lower bound of epsilon from guesses about them.

Instead of a trained update, a canary sends a random direction with the clip norm (Andrew et al. 2023, "One-shot
Empirical Privacy Estimation for Federated Learning", arXiv 2302.03098, Section 3), or, decided by a coin toss, zeros:
as if it did not participate. The audit uses only the first and the last version: their difference has a larger product
with the directions of canaries that participated. The bound follows from the guesses.

A bound below the claim proves nothing; a bound above it proves that the claim is wrong.

Source: Steinke, Nasr and Jagielski 2023, "Privacy Auditing with One (1) Training Run", arXiv 2305.08846, Theorem 5.2
and the algorithm of its Appendix D. Each of m canaries was included or left out by its own fair coin; an attacker who
sees the releases guesses for r of them. For a mechanism with (epsilon, delta), the probability of so many right guesses
is at most the p-value.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from fedplat import extras, job
from fedplat.errors import JobFileError, MissingExtraError
from fedplat.model import Parameters, Vector
from fedplat.privacy import accounting
from fedplat.simulation import api, run_folder
from fedplat.simulation.engines.interface import ClientTask, Engine, LocalUpdate
from fedplat.simulation.setup import RunSetup

MIN_CANARIES = 20
"""The smallest number of canaries: guesses about fewer prove nothing."""
MAX_CANARIES = 1000
_CHOICE, _DIRECTION = 51, 52
_OVERSIZE = 1e6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Audit:
    """The claimed cost of a job, and the bound that the canaries prove.

    `included` is the number of canaries that participated, `merged` their mean number of merged updates.
    """

    claimed: accounting.Cost
    bound: Bound
    confidence: float
    num_clients: int
    included: int
    merged: float

    @property
    def holds(self) -> bool:
        """True if the bound does not contradict the claim."""
        return self.bound.epsilon <= self.claimed.epsilon


class Canaries(Engine):
    """Wraps an engine and replaces the updates of some clients: `included` maps each canary to whether it participates.

    `norm` is the norm of a canary's update. Its report has `num_examples` examples, the largest weight of any client.
    """

    def __init__(
        self, inner: Engine, included: Mapping[int, bool], norm: float, num_examples: float, seed: int
    ) -> None:
        self._inner, self._included, self._seed = inner, included, seed
        self._norm, self._num_examples = norm, num_examples
        self.first: Parameters | None = None

    @property
    @override
    def num_clients(self) -> int:
        return self._inner.num_clients

    @override
    def num_examples(self, client: int) -> int:
        return self._inner.num_examples(client)

    @override
    def publish(self, version: int, model: Parameters) -> None:
        if self.first is None:
            self.first = model
        self._inner.publish(version, model)

    @override
    def retire(self, version: int) -> None:
        self._inner.retire(version)

    @override
    def begin(self, tasks: Sequence[ClientTask]) -> None:
        self._inner.begin([task for task in tasks if not self._is_canary(task)])

    @override
    def result(self, task: ClientTask) -> LocalUpdate:
        if not self._is_canary(task):
            return self._inner.result(task)
        assert self.first is not None
        update = Parameters.zeros(self.first.schema)
        if self._included[task.client]:
            update = update.plus((self._norm * self.direction(task.client)).astype(np.float32))
        return LocalUpdate(update, self._num_examples)

    @override
    def drop(self, task: ClientTask) -> None:
        if not self._is_canary(task):
            self._inner.drop(task)

    @override
    def client_states(self) -> Mapping[int, Mapping[str, Parameters]]:
        return self._inner.client_states()

    @override
    def set_client_states(self, client_states: Mapping[int, Mapping[str, Parameters]]) -> None:
        self._inner.set_client_states(client_states)

    @override
    def evaluate(self, model: Parameters) -> Mapping[str, float]:
        return self._inner.evaluate(model)

    @override
    def close(self) -> None:
        self._inner.close()

    def direction(self, client: int) -> Vector:
        """Return the direction of a canary, a vector of length 1."""
        assert self.first is not None
        rng = np.random.default_rng(np.random.SeedSequence([self._seed, _DIRECTION, client]))
        values = rng.standard_normal(self.first.schema.num_floating, np.float32)
        return values / np.float32(np.linalg.norm(values))

    def scores(self, last: Parameters) -> npt.NDArray[np.float64]:
        """Return how far the model has moved along each canary's direction, in the order of `included`."""
        assert self.first is not None
        step = last.to_vector() - self.first.to_vector()
        return np.array([float(step @ self.direction(client)) for client in self._included])

    def _is_canary(self, task: ClientTask) -> bool:
        return task.client in self._included and not task.scores


def choose_canaries(num_clients: int, num_canaries: int, seed: int) -> dict[int, bool]:
    """Draw the canaries; returns for each of them whether it participates, by a fair coin."""
    rng = np.random.default_rng(np.random.SeedSequence([seed, _CHOICE]))
    clients = rng.choice(num_clients, num_canaries, replace=False)
    return dict(zip(clients.tolist(), (rng.random(num_canaries) < 0.5).tolist(), strict=True))


def add_canaries(spec: job.JobSpec, engine: Engine, num_canaries: int, seed: int) -> tuple[Canaries, dict[int, bool]]:
    """Replace some clients of an engine by canaries; returns the new engine and the canaries with their coins.

    `num_canaries` = 0 stands for half of the clients, at most `MAX_CANARIES`. Raises `JobFileError` for a job without
    a privacy table, and for a number of canaries below `MIN_CANARIES` or above the number of clients.
    """
    if spec.privacy is None:
        raise JobFileError("privacy: there is no such table, so there is no promise to check; expected [privacy]")
    count = num_canaries or min(MAX_CANARIES, engine.num_clients // 2)
    if not MIN_CANARIES <= count <= engine.num_clients:
        raise JobFileError(
            f"{count} canaries of {engine.num_clients} clients: expected from {MIN_CANARIES} to {engine.num_clients}"
        )
    included = choose_canaries(engine.num_clients, count, seed)
    adaptive = spec.updates.adaptive_clip
    # With adaptive clipping the norm changes: a canary's update is so large that it is always clipped to it.
    norm = spec.updates.clip_norm if adaptive is None else _OVERSIZE * adaptive.initial_norm
    num_examples = spec.updates.max_examples if spec.updates.weighting == "examples" else 1.0
    return Canaries(engine, included, norm, num_examples, seed), included


def run_audit(
    file: api.SimulationFile,
    setup: RunSetup,
    *,
    num_canaries: int = 0,
    confidence: float = 0.95,
    observe: run_folder.Observer = lambda record: None,
    on_replayed: Callable[[], object] = lambda: None,
) -> Audit:
    """Run a prepared simulation with canaries, and guess their coins. Raises `JobFileError`, and what training raises.

    `on_replayed` is as in `api.execute`; `confidence` is that of the bound.
    """
    simulation = setup.simulation
    if simulation.engine is None:
        raise JobFileError("simulation.training = false: expected true, since the audit looks for canaries in a model")
    canaries, included = add_canaries(simulation.spec, simulation.engine, num_canaries, simulation.seed)
    changed = dataclasses.replace(setup, simulation=dataclasses.replace(simulation, engine=canaries))
    run = api.execute(file, changed, observe, on_replayed=on_replayed)
    assert run.privacy is not None
    assert run.model is not None
    coins = np.array(list(included.values()))
    merged = run.result.participation.merged[list(included)][coins]
    return Audit(
        claimed=run.privacy,
        bound=bound_of(canaries.scores(run.model), coins, run.privacy.delta, confidence),
        confidence=confidence,
        num_clients=run.result.num_clients,
        included=int(coins.sum()),
        merged=float(merged.mean()) if merged.size else 0.0,
    )


SHARES = (1.0, 0.3, 0.1)
"""Parts of the canaries that are guessed, one after the other: those with the highest and the lowest scores."""
_HALVINGS = 40


@dataclasses.dataclass(frozen=True)
class Guesses:
    """The numbers of canaries, of guesses, and of right guesses."""

    canaries: int
    guesses: int
    right: int


@dataclasses.dataclass(frozen=True)
class Bound:
    """A lower bound of epsilon at a given confidence; `best` are the guesses that prove it."""

    epsilon: float
    best: Guesses


def p_value(found: Guesses, epsilon: float, delta: float) -> float:
    """Return a bound on the probability of at least as many right guesses, if releases are (epsilon, delta)-private."""
    try:
        from scipy.stats import binom
    except ModuleNotFoundError as exc:
        raise MissingExtraError(f"an audit needs SciPy; install it with: {extras.install_command('privacy')}") from exc
    # Randomized response with this epsilon, the worst case, guesses right with this probability.
    right = 1.0 / (1.0 + math.exp(-epsilon))
    beyond = float(binom.sf(found.right - 1, found.guesses, right))
    if not found.right or not delta:
        return beyond
    below = np.cumsum(binom.pmf(np.arange(found.right - 1, -1, -1), found.guesses, right))
    alpha = float(np.max(below / np.arange(1, found.right + 1)))
    return min(1.0, beyond + 2.0 * found.canaries * delta * alpha)


def lower_bound(found: Guesses, delta: float, confidence: float = 0.95) -> float:
    """Return the largest epsilon that the guesses refute with this confidence; 0 if they refute none."""
    level = 1.0 - confidence
    if p_value(found, 0.0, delta) >= level:
        return 0.0
    low, high = 0.0, 1.0
    while p_value(found, high, delta) < level:
        low, high = high, 2.0 * high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2.0
        if p_value(found, middle, delta) < level:
            low = middle
        else:
            high = middle
    return low


def bound_of(
    scores: npt.NDArray[np.float64],
    included: npt.NDArray[np.bool_],
    delta: float,
    confidence: float = 0.95,
    shares: Sequence[float] = SHARES,
) -> Bound:
    """Return the best bound over several numbers of guesses, each with an equal part of the probability of error.

    `scores` are high for canaries that seem to be included: half of the guesses are the highest, half the lowest ones.
    """
    order = np.argsort(scores, kind="stable")
    num_canaries = len(order)
    each = 1.0 - (1.0 - confidence) / len(shares)
    bounds: list[Bound] = []
    for share in shares:
        half = max(1, int(share * num_canaries / 2))
        right = int(included[order[-half:]].sum()) + int((~included[order[:half]]).sum())
        found = Guesses(num_canaries, 2 * half, right)
        bounds.append(Bound(lower_bound(found, delta, each), found))
    return max(bounds, key=lambda bound: bound.epsilon)
