"""The names of enum values of the operators' API, as commands and pages show them."""

from __future__ import annotations

import re

from google.protobuf.descriptor import EnumDescriptor

from fedplat.wire.v1 import admin_pb2


def name_of(enum: EnumDescriptor, number: int) -> str:
    """Return the name of an enum value without the enum's own name: `RUNNING` for `JOB_STATUS_RUNNING`."""
    value = enum.values_by_number.get(number)
    if value is None:  # from a newer server
        return str(number)
    prefix = re.sub(r"(?<!^)(?=[A-Z])", "_", enum.name).upper()
    return str(value.name).removeprefix(f"{prefix}_")


def job_status(status: int) -> str:
    """Return the name of a job status: `RUNNING`."""
    return name_of(admin_pb2.JobStatus.DESCRIPTOR, status)


def attempt_phase(phase: int) -> str:
    """Return the name of an attempt phase: `COLLECTING`."""
    return name_of(admin_pb2.AttemptPhase.DESCRIPTOR, phase)


def attempt_kind(kind: int, job: admin_pb2.Job | None = None) -> str:
    """Return the name of an attempt kind in lower case: `train`, `warm start`.

    What the job of a Flower app, which has no number of rounds, does before round 1 is the start of its app.
    """
    if kind == admin_pb2.ATTEMPT_KIND_WARM_START and job is not None and not job.num_rounds:
        return "app start"
    return name_of(admin_pb2.AttemptKind.DESCRIPTOR, kind).lower().replace("_", " ")


def severity(value: int) -> str:
    """Return the severity of an alert in lower case: `critical`."""
    return name_of(admin_pb2.AlertSeverity.DESCRIPTOR, value).lower()
