"""What an approved job means for the assignments of a client: each field of theirs follows from it, or is free.

A client derives what it does from the text that its owner has approved, not from what the server sends: any difference
ends the assignment (`NOT_APPROVED`). A field that is in neither table is refused, so that a later one is not forgotten.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
from msgspec import structs

from fedplat import texts
from fedplat.codecs.container import options_to_text
from fedplat.config.plugins import Plugins
from fedplat.errors import JobFileError, SecureAggregationError
from fedplat.job import JobSpec, digest_text, parse_job
from fedplat.job.terms import Exchange, derive_exchange, derive_setup, max_rounds
from fedplat.procedures import versions
from fedplat.secure_aggregation.setup import AnySetup, Setup
from fedplat.wire.v1 import fleet_pb2
from fedplat_client._state.approvals import OfferedFile
from fedplat_client._work import training


@dataclasses.dataclass(frozen=True)
class OfferedJob:
    """A job whose file and initial model have this digest."""

    digest: str
    spec: JobSpec
    offer: OfferedFile


def read_offer(digest: str, offer: OfferedFile, plugins: Plugins) -> OfferedJob:
    """Read the file of a job. Raises `JobFileError` if it is not that of the digest, or cannot be read.

    The plugins that the file names and that this client does not have keep their options as they are.
    """
    try:
        found = digest_text(offer.job_file, offer.initial_digest, plugins)
    except ValueError as exc:
        raise JobFileError(f"the digest of the initial model cannot be read: {exc}") from exc
    if found != digest:
        raise JobFileError(
            f"the server has sent the file of another job, or has another version of its procedure: its digest is "
            f"{found[:16]}"
        )
    pairs = (each.partition(".") for each in offer.plugins)
    absent = frozenset((kind, name) for kind, _, name in pairs) - plugins.given.keys()
    return OfferedJob(digest, parse_job(offer.job_file, dataclasses.replace(plugins, absent=absent)), offer)


FREE = frozenset(
    {
        *("token", "job_id", "attempt", "traceparent"),  # names that the server chooses
        *("training_timeout_s", "upload_timeout_s", "heartbeat_s"),
        *("model_bytes", "delta"),  # they must give the model, whose digest `model` has
        *("digest_last", "blake3", "check_in_with_report", "max_downloads"),  # how bytes are transferred
    }
)
"""Fields that may have any value."""


def list_differences(job: OfferedJob, assignment: fleet_pb2.Assignment) -> Iterator[str]:
    """Yield what an assignment says otherwise than its job, a text for each field."""
    sent = {field.name for field, _ in assignment.ListFields()}
    for name in sorted(sent - FREE - CHECKS.keys()):
        yield f"{name}: the approved job has none"
    for name, check in CHECKS.items():
        for difference in check(job, assignment):
            yield f"{name}: {difference}"


Check = Callable[[OfferedJob, fleet_pb2.Assignment], Iterator[str]]


def _equal(derive: Callable[[JobSpec, fleet_pb2.Assignment], Any], name: str) -> Check:
    """Return the check that a field has the value that follows from the job."""

    def check(job: OfferedJob, assignment: fleet_pb2.Assignment) -> Iterator[str]:
        yield from _compare(derive(job.spec, assignment), getattr(assignment, name))

    return check


def _compare(approved: object, found: object) -> Iterator[str]:
    if type(approved) is not type(found) or approved != found:
        yield f"approved is {_show(approved)}, the assignment has {_show(found)}"


def _show(value: object) -> str:
    return texts.printable(repr(value))[:100]


def _trains(assignment: fleet_pb2.Assignment) -> bool:
    return assignment.task == fleet_pb2.TASK_TRAIN


def _check_trainer(job: OfferedJob, assignment: fleet_pb2.Assignment) -> Iterator[str]:
    evaluation = job.spec.evaluation.clients
    evaluator = evaluation.evaluator if evaluation is not None else None
    yield from _compare(job.spec.trainer if _trains(assignment) else evaluator, assignment.trainer)


def _check_task(job: OfferedJob, assignment: fleet_pb2.Assignment) -> Iterator[str]:
    if assignment.task not in (fleet_pb2.TASK_TRAIN, fleet_pb2.TASK_EVALUATE):
        yield f"approved are training and evaluation, the assignment has {assignment.task}"


def _check_round(job: OfferedJob, assignment: fleet_pb2.Assignment) -> Iterator[str]:
    most = max_rounds(job.spec) if _trains(assignment) else job.spec.rounds
    if assignment.round > most:
        yield f"approved are {most}, the assignment is for {assignment.round}"


def _check_model(job: OfferedJob, assignment: fleet_pb2.Assignment) -> Iterator[str]:
    """Check the initial model; those of later versions follow from what clients send."""
    if assignment.model.version == 0:
        yield from _compare(job.offer.initial_digest, assignment.model.digest)


def _check_config(job: OfferedJob, assignment: fleet_pb2.Assignment) -> Iterator[str]:
    approved, found = dict(job.spec.client_config), training.read_config(assignment)
    for key in sorted(approved.keys() | found.keys()):
        for difference in _compare(approved.get(key), found.get(key)):
            yield f"{texts.printable(key)[:100]}: {difference}"


def _uplink(spec: JobSpec, assignment: fleet_pb2.Assignment) -> str:
    codec = spec.compression.uplink if _trains(assignment) else None
    return options_to_text(codec) if codec is not None else ""


def _leaves_out(spec: JobSpec, assignment: fleet_pb2.Assignment) -> bool:
    return _trains(assignment) and bool(spec.turn(1).groups)


def _check_secure_setup(job: OfferedJob, assignment: fleet_pb2.Assignment) -> Iterator[str]:
    key = (assignment.job_id, assignment.round, assignment.attempt)
    try:
        approved, found = derive_setup(job.spec, key, assignment.model.digest, assignment.secure_setup)
    except SecureAggregationError as exc:
        yield str(exc)
        return
    yield from _list_values(_round_noise(approved), _round_noise(found))


def _round_noise(setup: AnySetup | None) -> object:
    """Return the values of a setup, of the noise seven digits: another accountant's may differ in the last ones."""
    if setup is None:
        return None
    if isinstance(setup, Setup) and (noise := setup.encoding.noise) is not None:
        rounded = structs.replace(
            noise,
            scale=_round(noise.scale),
            variance=_round(noise.variance),
            metrics_variance=_round(noise.metrics_variance),
        )
        setup = structs.replace(setup, encoding=structs.replace(setup.encoding, noise=rounded))
    return msgspec.to_builtins(setup)


def _round(value: float) -> float:
    return float(f"{value:.6e}") if math.isfinite(value) else value


def _list_values(approved: object, found: object, key: str = "") -> Iterator[str]:
    if isinstance(approved, Mapping) and isinstance(found, Mapping):
        for name in approved:
            yield from _list_values(approved[name], found.get(name), f"{key}.{name}".removeprefix("."))
        return
    for difference in _compare(approved, found):
        yield f"{key}: {difference}" if key else difference


def _check_gossip_setup(job: OfferedJob, assignment: fleet_pb2.Assignment) -> Iterator[str]:
    found, setup = None, assignment.gossip_setup
    if assignment.HasField("gossip_setup"):
        found = Exchange(setup.trains, setup.exchange, setup.gamma if setup.HasField("gamma") else None)
    yield from _compare(derive_exchange(job.spec, assignment.round), found)


def _check_procedure(job: OfferedJob, assignment: fleet_pb2.Assignment) -> Iterator[str]:
    """Check the options; the client computes the form of its reply from them, and compares it and the version."""
    procedure, found = job.spec.procedure, assignment.procedure
    approved = versions.encode_options(procedure) if procedure is not None else None
    yield from _compare(approved, found.options if assignment.HasField("procedure") else None)


CHECKS: Mapping[str, Check] = {
    "job_name": _equal(lambda spec, _: spec.name, "job_name"),
    "job_digest": lambda job, assignment: _compare(job.digest, assignment.job_digest),
    "task": _check_task,
    "trainer": _check_trainer,
    "round": _check_round,
    "num_rounds": _equal(lambda spec, _: spec.rounds, "num_rounds"),
    "model": _check_model,
    "config": _check_config,
    "uplink": _equal(_uplink, "uplink"),
    "leaves_out_resting": _equal(_leaves_out, "leaves_out_resting"),
    "secure_setup": _check_secure_setup,
    "gossip_setup": _check_gossip_setup,
    "procedure": _check_procedure,
}
"""The other fields, each with what follows from the job."""
