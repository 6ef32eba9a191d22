"""The sum of the replies to a step of a procedure, and the next version that the procedure makes of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from typing_extensions import override

from fedplat.config import user_code
from fedplat.config.plugins import name_of
from fedplat.job import JobSpec
from fedplat.job.tables import require_procedure
from fedplat.model import Parameters
from fedplat.model.file import FilePart
from fedplat.procedures import ExactSum, ReplySchema, ReplyTotals, versions
from fedplat.procedures.versions import ProcedureVersion
from fedplat.rounds import JobState
from fedplat_server.aggregation import backend
from fedplat_server.aggregation.backend import Aggregate, AggregationBackend
from fedplat_server.storage.blobs import Blob, BlobStore
from fedplat_server.workers.task_inputs import AttemptInputs, SpooledUpdate


def find_schema(spec: JobSpec, message: Path) -> ReplySchema:
    """Return the form of the replies to the message in a file. Raises `ProcedureError` and `UserCodeError`. Blocks."""
    procedure = require_procedure(spec)
    with user_code.wrap_errors(f'procedure.kind = "{name_of(procedure)}": schema()'):
        return procedure.schema(Parameters.open(message))


def advance(job: JobState, inputs: AttemptInputs, totals: ReplyTotals) -> ProcedureVersion:
    """Return the version after a step. Raises `ProcedureError` and `UserCodeError`. Blocks."""
    procedure = require_procedure(job.spec)
    with user_code.wrap_errors(f'procedure.kind = "{name_of(procedure)}": advance()'):
        if inputs.version == 1:
            state = versions.begin(procedure).state
        else:
            state = Path(inputs.state_path).read_bytes() if inputs.state_path else b""
        return versions.advance(procedure, inputs.version, state, totals)


def store(version: ProcedureVersion, blobs: BlobStore) -> tuple[Blob, Blob | None]:
    """Store the files of a version: its model, and the state of its step if it has one. Blocks."""
    with backend.store_model(), blobs.writer() as model:
        for piece in version.model.pieces:
            model.write(piece)
    if not version.state:
        return model.blob, None
    with backend.store_state(), blobs.writer() as state:
        state.write(version.state)
    return model.blob, state.blob


class ProcedureAggregation(AggregationBackend):
    """A backend that adds replies in 64 bits as they arrive: the same bits in any order.

    `find_job` returns the job as it is when the attempt commits.
    """

    def __init__(self, find_job: Callable[[], JobState], inputs: AttemptInputs, blobs: BlobStore) -> None:
        self._find_job, self._inputs, self._blobs = find_job, inputs, blobs
        self._total: ExactSum | None = None
        self._clients: list[str] = []

    @property
    @override
    def keeps_updates(self) -> bool:
        return False

    @override
    async def fold(self, updates: Sequence[SpooledUpdate]) -> None:
        await backend.run_to_the_end(self._fold, updates)

    @override
    async def commit(self, draft: Path | None = None) -> Aggregate:
        return await backend.run_to_the_end(self._commit)

    @override
    async def close(self) -> None:
        pass

    def _fold(self, updates: Sequence[SpooledUpdate]) -> None:
        schema = find_schema(self._inputs.spec, Path(self._inputs.base_path))
        if self._total is None:
            self._total = ExactSum(schema)
        for update in updates:
            part = FilePart(Path(update.path), update.start, update.size_bytes)
            self._total.add(schema.read(part.read()))
            self._clients.append(update.contribution.client_id)

    def _commit(self) -> Aggregate:
        assert self._total is not None  # an attempt commits with the replies of all sites
        return make_aggregate(self._find_job(), self._inputs, self._blobs, self._total.totals, tuple(self._clients))


def make_aggregate(
    job: JobState, inputs: AttemptInputs, blobs: BlobStore, totals: ReplyTotals, clients: tuple[str, ...]
) -> Aggregate:
    """Return the aggregate of a step with these sums, of these clients, whose files are stored. Blocks."""
    after = advance(job, inputs, totals)
    model, state = store(after, blobs)
    return Aggregate(
        model=model,
        state=state,
        num_updates=totals.num_sites,
        total_weight=float(totals.num_sites),
        published={},
        cohort=() if after.is_result else clients,
    )
