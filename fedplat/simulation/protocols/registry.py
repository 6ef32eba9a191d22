"""How each kind of job is simulated, by the name of its protocol."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from fedplat import errors, job, model
from fedplat.rounds.protocols.base import find_training, training_name
from fedplat.rounds.states import AttemptKind
from fedplat.simulation.clients import Fleet
from fedplat.simulation.clients.fleet import LinkOptions
from fedplat.simulation.engines.interface import Engine
from fedplat.simulation.federated.procedure import ProcedureAnswers
from fedplat.simulation.federated.training import RealTraining
from fedplat.simulation.gossip import mixing, silos
from fedplat.simulation.parts import Simulation
from fedplat.simulation.protocols import buffered, gossip, secure
from fedplat.simulation.protocols.base import ClientBehaviour, ClientWork
from fedplat.simulation.recording.result import Result
from fedplat.simulation.recording.statistics import Observer
from fedplat.simulation.secure.groups import ModelledProtocol, SecureProtocol

MAX_REAL = 1000
"""The largest cohort whose secure aggregation is computed with its cryptography, unless the simulation has `"real"`."""


def _make_protocol(simulation: Simulation) -> SecureProtocol | None:
    """Return what masks updates; None if clients do not mask them."""
    if not runs_protocol(simulation):
        return ModelledProtocol() if find_training(simulation.spec).has_masks else None
    from fedplat.simulation.secure.real import RealProtocol

    return RealProtocol(simulation.seed)


def _learn(simulation: Simulation, engine: Engine, initial: model.Parameters) -> RealTraining:
    return RealTraining(simulation.spec, engine, initial, simulation.seed, _make_protocol(simulation))


def _learn_silos(simulation: Simulation, engine: Engine, initial: model.Parameters) -> silos.SiloTraining:
    return silos.SiloTraining(silos.SiloModels(simulation.spec, engine, initial, simulation.seed), simulation.links)


def _mix(simulation: Simulation, observe: Observer | None) -> Result:
    return mixing.mix_without_training(
        mixing.Mixing(
            spec=simulation.spec,
            fleet=simulation.fleet,
            links=simulation.links,
            seed=simulation.seed,
            until_s=simulation.until_s,
            model_bytes=simulation.model_bytes,
            observe=observe,
        )
    )


def _answer(simulation: Simulation) -> ProcedureAnswers | None:
    return None if simulation.tables is None else ProcedureAnswers(simulation.spec, simulation.tables)


def _refuse_masks(spec: job.JobSpec, fleet: Fleet, links: LinkOptions) -> None:
    raise errors.JobFileError(
        "secure_aggregation: a procedure is simulated without it, since its sums and its result are the same; leave "
        "the table out"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimulatedKind:
    """A kind of job in a simulation: what its clients do over time.

    `check` raises `JobFileError` for a fleet or links that the job cannot have. `learn` makes what clients train with
    an engine, from the initial model, and `mix` is the whole run of a job without training that no driver runs. Where
    clients answer from tables, and no engine trains, `answer` makes what does so.
    """

    behave: Callable[[ClientWork], ClientBehaviour] = ClientBehaviour
    check: Callable[[job.JobSpec, Fleet, LinkOptions], None] = mixing.refuse_links
    learn: Callable[[Simulation, Engine, model.Parameters], RealTraining | silos.SiloTraining] = _learn
    mix: Callable[[Simulation, Observer | None], Result] | None = None
    answer: Callable[[Simulation], ProcedureAnswers | None] | None = None


_AVERAGING = SimulatedKind()
_BUFFERED = SimulatedKind(behave=buffered.BufferedBehaviour)
_SECURE = SimulatedKind(behave=secure.SecureBehaviour)
KINDS: Mapping[str, SimulatedKind] = {
    "sync": _AVERAGING,
    "private sync": _AVERAGING,
    "flower_app": _AVERAGING,
    "cyclic": _AVERAGING,
    "procedure": SimulatedKind(answer=_answer),
    "secure_procedure": SimulatedKind(answer=_answer, check=_refuse_masks),
    "buffered": _BUFFERED,
    "ssp": _BUFFERED,
    "secure": _SECURE,
    "private secure": _SECURE,
    "gossip": SimulatedKind(behave=gossip.SiloBehaviour, check=mixing.check_silos, learn=_learn_silos, mix=_mix),
}


def kind_of(spec: job.JobSpec) -> SimulatedKind:
    """Return how a job is simulated."""
    return KINDS[training_name(spec)]


def make_behaviours(work: ClientWork) -> Mapping[AttemptKind, ClientBehaviour]:
    """Return what clients do in the attempts of each kind: those to train have the behaviour of the job."""
    return {kind: ClientBehaviour(work) for kind in AttemptKind} | {AttemptKind.TRAIN: kind_of(work.spec).behave(work)}


def runs_protocol(simulation: Simulation) -> bool:
    """Return whether the cryptography of a secure aggregation is computed."""
    spec, mode = simulation.spec, simulation.secure_aggregation
    if not find_training(spec).has_masks or simulation.engine is None or mode == "model":
        return False
    return mode == "real" or spec.selection.target <= MAX_REAL
