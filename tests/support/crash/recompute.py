"""What must be true of a training after all crashes, computed from the database and the clients' updates alone."""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

from fedplat.aggregate import (
    Accumulator,
    Contribution,
    compress_step,
    rebase,
    seed_of,
    state_from_bytes,
    state_to_bytes,
)
from fedplat.codecs.container import Format
from fedplat.job import JobSpec, build_rule
from fedplat.model import Parameters, Values
from fedplat.rounds.invariants.records import AssignmentRow, StoredAttempt, StoredJob, VersionRow
from fedplat.wire import digests
from fedplat_server.verify import files, inspection
from support.crash.scenario import World, content_of
from support.daemons import digest_of

Result: TypeAlias = tuple[StoredJob, dict[tuple[int, int], StoredAttempt]]


async def read(database: str) -> Result:
    """The one job in the database, and its attempts by round and number."""
    jobs: list[StoredJob] = []
    attempts: dict[tuple[int, int], StoredAttempt] = {}
    async with inspection.snapshot(database) as connection:
        async for unit in inspection.units(connection):
            if isinstance(unit, StoredJob):
                jobs.append(unit)
            elif isinstance(unit, StoredAttempt):
                attempts[unit.row.round, unit.row.number] = unit
    (job,) = jobs
    return job, attempts


def merged(attempt: StoredAttempt) -> list[AssignmentRow]:
    """The merged reports in the order of their acceptance."""
    found = [one for one in attempt.assignments if one.state == "MERGED"]
    return sorted(found, key=lambda one: one.reported_revision or 0)


def check_versions(world: World, result: Result, data_dir: Path) -> None:
    """I10: from the updates that the database says were merged, in that order, come the same bits."""
    job, attempts = result
    assert job.spec is not None
    assert [version.version for version in job.versions] == list(range(job.spec.rounds + 1))
    for before, version in zip(job.versions, job.versions[1:], strict=False):
        cohort = merged(attempts[version.round, version.attempt])
        codec = job.spec.compression.uplink
        # What a client sends depends on the round that it began in, which is an earlier one if its update is stale.
        updates = [(content_of(world.numbers[one.client_id], one.round, codec, world.side), one) for one in cohort]
        assert [(digest_of(content, digests.kind_of(one.digest)), len(content)) for content, one in updates] == [
            (one.digest, one.update_bytes) for one in cohort
        ]
        made = _aggregate(job, data_dir / "blobs", before, updates)
        assert [digest_of(one) if one else "" for one in made] == [
            version.digest,
            version.state_digest,
            version.delta_digest,
        ], f"version {version.version} is not what its updates give"


def _aggregate(
    job: StoredJob, blobs: Path, before: VersionRow, updates: list[tuple[bytes, AssignmentRow]]
) -> tuple[bytes, bytes, bytes]:
    """The files of the next version, of the rule's state and of the delta."""
    spec, payloads = job.spec, list[bytes]()
    assert spec is not None
    seed = seed_of(job.row.job_id, before.version + 1)
    rule, codec = build_rule(spec, seed), spec.compression.downlink
    if codec is not None:
        rule = compress_step(codec.build(), seed, payloads.append)(rule)
    base = Parameters.open(files.path_of(blobs, before.digest))
    state, scalars = rule.init(base.schema.num_floating), dict[str, float]()
    if before.state_digest:
        state, scalars = state_from_bytes(files.path_of(blobs, before.state_digest).read_bytes())
    accumulator = Accumulator(base.schema, rule, scalars)
    for content, row in updates:
        values = _values(content, base, spec)
        if rule.from_latest and row.base_version != before.version:
            origin = next(one for one in job.versions if one.version == row.base_version)
            values = rebase(values, Parameters.open(files.path_of(blobs, origin.digest)), base)
        accumulator.fold(values, contribution_of(row))
    model, state = accumulator.finish(base, state)
    delta = b"" if codec is None else b"".join(Format(codec, base.schema).frame_payload(payloads, model))
    return model.to_bytes(), state_to_bytes(state, accumulator.scalars), delta


def contribution_of(row: AssignmentRow) -> Contribution:
    return Contribution(row.weight, row.num_examples, row.metrics, row.staleness or 0, row.client_id)


def _values(content: bytes, base: Parameters, spec: JobSpec) -> Values:
    codec = spec.compression.uplink
    return Parameters.from_bytes(content) if codec is None else Format(codec, base.schema).decode(content)


def check_receipts(world: World, result: Result, *, kept: bool) -> None:
    """I3: what was acknowledged was merged; if updates need not be `kept`, it may also have ended for a reason."""
    _, attempts = result
    rows = {(one.client_id, *number): one for number, attempt in attempts.items() for one in attempt.made}
    for receipt in world.receipts:
        row = rows[receipt.client_id, receipt.round, receipt.attempt]
        assert row.digest == receipt.digest
        assert row.state == "MERGED" or (not kept and row.reason), f"{receipt} is {row.state}"
