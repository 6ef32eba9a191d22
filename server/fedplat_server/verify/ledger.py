"""Checks that private jobs are charged for what they have released: I5 of the design."""

from __future__ import annotations

from collections.abc import Iterator

from fedplat.job import find_mechanism, plan_charge
from fedplat_server.store.ledger import spelled
from fedplat_server.verify.records import Job, Place, Wrong


def releases_are_charged(job: Job) -> Iterator[Wrong]:
    """I5: each version that a round of a private job made has its row of the ledger, and no other version has one."""
    if job.spec is None:
        return
    mechanism = find_mechanism(job.spec)
    made = {version.version: version for version in job.versions if version.is_aggregate and mechanism is not None}
    charged = {row.version: row for row in job.ledger}
    for number in made.keys() - charged.keys():
        yield Wrong(Place(job.row.job_id, version=number), "it is not in the ledger", "a row for each private release")
    for number, row in charged.items():
        place, version = Place(job.row.job_id, version=number), made.get(number)
        if version is None:
            yield Wrong(place, "it is in the ledger", "rows for the releases of private jobs only")
        elif row.round != version.round:
            yield Wrong(place, f"the ledger has it in round {row.round}", f"round {version.round}, that of the version")
        elif mechanism is not None and row.mechanism != spelled(mechanism):
            yield Wrong(place, f"the ledger has {row.mechanism[:300]}", f"the job's mechanism, {spelled(mechanism)}")


def releases_are_within_the_plan(job: Job) -> Iterator[Wrong]:
    """I5: a private job releases no more than was planned when it was created."""
    planned = plan_charge(job.spec) if job.spec is not None else None
    if planned is not None and len(job.ledger) > planned.releases:
        found = f"the ledger has {len(job.ledger)} releases"
        yield Wrong(Place(job.row.job_id), found, f"at most {planned.releases}, as its budget allows")
