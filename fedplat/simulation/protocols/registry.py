"""How each kind of job is simulated, by the name of its protocol."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from fedplat.job import JobSpec
from fedplat.rounds.protocols.base import training_name
from fedplat.rounds.states import AttemptKind
from fedplat.simulation.protocols.base import ClientBehaviour, ClientWork
from fedplat.simulation.protocols.buffered import BufferedBehaviour
from fedplat.simulation.protocols.secure import SecureBehaviour


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimulatedKind:
    """A kind of job in a simulation: what its clients do over time, and whether they mask their updates."""

    behave: Callable[[ClientWork], ClientBehaviour] = ClientBehaviour
    has_masks: bool = False


_AVERAGING = SimulatedKind()
_BUFFERED = SimulatedKind(behave=BufferedBehaviour)
_SECURE = SimulatedKind(behave=SecureBehaviour, has_masks=True)
KINDS: Mapping[str, SimulatedKind] = {
    "sync": _AVERAGING,
    "private sync": _AVERAGING,
    "flower_app": _AVERAGING,
    "cyclic": _AVERAGING,
    "buffered": _BUFFERED,
    "ssp": _BUFFERED,
    "secure": _SECURE,
    "private secure": _SECURE,
    "gossip": _AVERAGING,  # `fedplat.simulation.gossip.driver` simulates its silos
}


def kind_of(spec: JobSpec) -> SimulatedKind:
    """Return how a job is simulated."""
    return KINDS[training_name(spec)]


def make_behaviours(work: ClientWork) -> Mapping[AttemptKind, ClientBehaviour]:
    """Return what clients do in the attempts of each kind: those to train have the behaviour of the job."""
    return {kind: ClientBehaviour(work) for kind in AttemptKind} | {AttemptKind.TRAIN: kind_of(work.spec).behave(work)}
