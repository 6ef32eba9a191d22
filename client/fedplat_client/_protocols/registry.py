"""Which half each kind has, by the names of `fedplat.rounds.protocols.registry`.

Halves with modules of their own are loaded for the first assignment that needs them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from fedplat.wire.v1 import fleet_pb2
from fedplat_client._protocols import averaging
from fedplat_client._work.heartbeat import CheckInResult
from fedplat_client._work.work import AssignedWork, ClientHalf

if TYPE_CHECKING:
    from fedplat_client._protocols.gossip.worker import SiloWorker


def make_halves(open_silos: Callable[[], SiloWorker]) -> Mapping[str, ClientHalf]:
    """Return the halves of a session by name. No client takes part in a warm start."""

    def exchange(work: AssignedWork) -> CheckInResult:
        return open_silos().run(work)

    averaged = ClientHalf(averaging.train)
    return {
        "sync": averaged,
        "buffered": averaged,
        "ssp": averaged,
        "cyclic": averaged,
        "flower_app": averaged,
        "secure": ClientHalf(_train_secretly),
        "gossip": ClientHalf(exchange, may_be_late=True),
        "procedure": ClientHalf(_answer),
        "secure_procedure": ClientHalf(_answer_masked),
        "evaluation": ClientHalf(averaging.evaluate),
    }


def name_of(assignment: fleet_pb2.Assignment) -> str:
    """Return the name of the half for an assignment; a client cannot tell those apart that are averaged."""
    if assignment.HasField("gossip_setup"):
        return "gossip"
    if assignment.task == fleet_pb2.TASK_EVALUATE:
        return "evaluation"
    if assignment.HasField("procedure"):
        return "secure_procedure" if assignment.secure_setup else "procedure"
    return "secure" if assignment.secure_setup else "sync"


def _answer(work: AssignedWork) -> CheckInResult:
    from fedplat_client._protocols import procedure

    return procedure.answer(work)


def _answer_masked(work: AssignedWork) -> CheckInResult:
    from fedplat_client._protocols import procedure

    return procedure.answer_masked(work)


def _train_secretly(work: AssignedWork) -> CheckInResult:
    from fedplat_client._protocols import secure

    return secure.train(work)
