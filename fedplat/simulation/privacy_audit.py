"""An audit of a private job by one simulated run of it, with canaries among its clients.

A canary sends a random direction of the clip norm in place of what it would have trained (Andrew et al. 2023, "One-shot
Empirical Privacy Estimation for Federated Learning", arXiv 2302.03098, Section 3), or, by the toss of a coin, zeros: as
if it had no part in the job. Nothing but the first and the last version is looked at: what lies between them has a
larger product with the directions of those that took part. `fedplat.privacy.audit` says what the guesses prove.

That the bound is below the claim proves nothing; that it is above would prove that the claim is wrong.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from fedplat.errors import JobFileError
from fedplat.job import JobSpec
from fedplat.model import Parameters, Vector
from fedplat.privacy.audit import Bound, bound_of
from fedplat.privacy.cost import Cost
from fedplat.simulation import api
from fedplat.simulation.engines.interface import Engine, LocalUpdate, Work
from fedplat.simulation.run_folder import Observer
from fedplat.simulation.setup import Setup

FEWEST = 20
"""Canaries; of less no guess says anything."""
MAX_CANARIES = 1000
_CHOICE, _DIRECTION = 51, 52
_FAR = 1e6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Audit:
    """What a job claims, and what the canaries show. `merged` is how often the included ones took part, on average."""

    claimed: Cost
    bound: Bound
    confidence: float
    num_clients: int
    included: int
    merged: float

    @property
    def holds(self) -> bool:
        """Whether nothing contradicts the claim."""
        return self.bound.epsilon <= self.claimed.epsilon


class Canaries:
    """An engine some of whose clients are canaries: `included` by client. They are not trained; all others are.

    A report of a canary weighs as much as any may.
    """

    def __init__(
        self, inner: Engine, included: Mapping[int, bool], norm: float, num_examples: float, seed: int
    ) -> None:
        self._inner, self._included, self._seed = inner, included, seed
        self._norm, self._num_examples = norm, num_examples
        self.first: Parameters | None = None

    @property
    def num_clients(self) -> int:
        """See `Engine`."""
        return self._inner.num_clients

    def num_examples(self, client: int) -> int:
        """See `Engine`."""
        return self._inner.num_examples(client)

    def publish(self, version: int, model: Parameters) -> None:
        """See `Engine`."""
        if self.first is None:
            self.first = model
        self._inner.publish(version, model)

    def retire(self, version: int) -> None:
        """See `Engine`."""
        self._inner.retire(version)

    def begin(self, works: Sequence[Work]) -> None:
        """See `Engine`."""
        self._inner.begin([work for work in works if not self._is_canary(work)])

    def result(self, work: Work) -> LocalUpdate:
        """See `Engine`."""
        if not self._is_canary(work):
            return self._inner.result(work)
        assert self.first is not None
        update = Parameters.zeros(self.first.schema)
        if self._included[work.client]:
            update = update.plus((self._norm * self.direction(work.client)).astype(np.float32))
        return LocalUpdate(update, self._num_examples)

    def drop(self, work: Work) -> None:
        """See `Engine`."""
        if not self._is_canary(work):
            self._inner.drop(work)

    def memories(self) -> Mapping[int, Mapping[str, Parameters]]:
        """See `Engine`."""
        return self._inner.memories()

    def remember(self, memories: Mapping[int, Mapping[str, Parameters]]) -> None:
        """See `Engine`."""
        self._inner.remember(memories)

    def evaluate(self, model: Parameters) -> Mapping[str, float]:
        """See `Engine`."""
        return self._inner.evaluate(model)

    def close(self) -> None:
        """See `Engine`."""
        self._inner.close()

    def direction(self, client: int) -> Vector:
        """A canary's direction, of length 1."""
        assert self.first is not None
        rng = np.random.default_rng(np.random.SeedSequence([self._seed, _DIRECTION, client]))
        values = rng.standard_normal(self.first.schema.num_floating, np.float32)
        return values / np.float32(np.linalg.norm(values))

    def scores(self, last: Parameters) -> npt.NDArray[np.float64]:
        """How far the model has moved along each canary's direction, in the order of `included`."""
        assert self.first is not None
        step = last.to_vector() - self.first.to_vector()
        return np.array([float(step @ self.direction(client)) for client in self._included])

    def _is_canary(self, work: Work) -> bool:
        return work.client in self._included and not work.scores


def choose_canaries(num_clients: int, num_canaries: int, seed: int) -> dict[int, bool]:
    """Which clients are canaries, and on which of them the coin says that they are in."""
    rng = np.random.default_rng(np.random.SeedSequence([seed, _CHOICE]))
    clients = rng.choice(num_clients, num_canaries, replace=False)
    return dict(zip(clients.tolist(), (rng.random(num_canaries) < 0.5).tolist(), strict=True))


def canaries_of(spec: JobSpec, engine: Engine, num_canaries: int, seed: int) -> tuple[Canaries, dict[int, bool]]:
    """An engine with canaries in place of some of its clients, and what they are; 0 stands for half of the clients.

    Raises `JobFileError` for a job that promises nothing, and for a number of canaries that cannot be.
    """
    if spec.privacy is None:
        raise JobFileError("privacy: there is no such table, so there is no promise to check; expected [privacy]")
    count = num_canaries or min(MAX_CANARIES, engine.num_clients // 2)
    if not FEWEST <= count <= engine.num_clients:
        raise JobFileError(
            f"{count} canaries of {engine.num_clients} clients: expected from {FEWEST} to {engine.num_clients}"
        )
    included = choose_canaries(engine.num_clients, count, seed)
    adaptive = spec.updates.adaptive_clip
    # Whatever adaptive clipping makes of its norm, it is clipped to it.
    norm = spec.updates.clip_norm if adaptive is None else _FAR * adaptive.initial_norm
    num_examples = spec.updates.max_examples if spec.updates.weighting == "examples" else 1.0
    return Canaries(engine, included, norm, num_examples, seed), included


def run_audit(
    file: api.SimulationFile,
    setup: Setup,
    *,
    num_canaries: int = 0,
    confidence: float = 0.95,
    observe: Observer = lambda record: None,
    begins: Callable[[], object] = lambda: None,
) -> Audit:
    """Runs what was prepared with canaries, and guesses. Raises `JobFileError`, and what training raises."""
    simulation = setup.simulation
    if simulation.engine is None:
        raise JobFileError("simulation.training = false: expected true, since canaries are looked for in a model")
    canaries, included = canaries_of(simulation.spec, simulation.engine, num_canaries, simulation.seed)
    changed = dataclasses.replace(setup, simulation=dataclasses.replace(simulation, engine=canaries))
    run = api.execute(file, changed, observe, begins=begins)
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
