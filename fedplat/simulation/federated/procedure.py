"""A procedure in virtual time: sites answer from their tables when they report, and the last version is the result.

Replies, sums and versions are those of a server, with the same bytes. Drop-outs, deadlines and pauses are those of the
fleet and the job.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from hashlib import sha256

from typing_extensions import override

from fedplat import errors, texts
from fedplat.config import user_code
from fedplat.config.plugins import name_of
from fedplat.job import JobSpec
from fedplat.job.tables import require_procedure
from fedplat.model import Parameters
from fedplat.procedures import ColumnFrame, ExactSum, ReplySchema, SiteTable, versions
from fedplat.procedures.sums import Integers
from fedplat.rounds import Assignment, AssignmentId, AttemptKey, JobState, ModelVersion, commands, states
from fedplat.rounds.events import AggregationFailed, AssignmentFailed, AttemptAggregated, UpdateReported
from fedplat.simulation.clients.device import DeviceAssignment, Sizes
from fedplat.simulation.federated.interface import TrainingModel


class ProcedureAnswers(TrainingModel):
    """The messages of a procedure and the replies of sites; client k has the k-th table."""

    one_at_a_time = False

    def __init__(self, spec: JobSpec, tables: Mapping[str, ColumnFrame]) -> None:
        self._procedure = require_procedure(spec)
        self._tables = [(name, SiteTable(frame)) for name, frame in tables.items()]
        self._version = 0
        self._replies: dict[AssignmentId, Integers] = {}
        self._folded: dict[AssignmentId, Integers] = {}
        self._begin(versions.begin(self._procedure))

    def _begin(self, version: versions.ProcedureVersion) -> None:
        self._current = version
        self._schema: ReplySchema | None = None
        if not version.is_result:
            self._schema = self._procedure.schema(version.model)

    @property
    def model(self) -> Parameters:
        """The latest version."""
        return self._current.model

    @functools.cached_property
    def _wrap(self) -> str:
        return f'procedure.kind = "{name_of(self._procedure)}"'

    @property
    @override
    def sizes(self) -> Sizes:
        reply = 0.0 if self._schema is None else float(self._schema.file_size_bytes)
        return Sizes(float(self.model.schema.file_size_bytes), reply)

    @override
    def first_version(self) -> ModelVersion:
        return self._describe(AttemptKey("", 0, 0), 0)

    def _describe(self, key: AttemptKey, num_updates: int) -> ModelVersion:
        content = self.model.to_bytes()
        return ModelVersion(
            version=self._version,
            round=key.round,
            attempt=key.number,
            digest=sha256(content).hexdigest(),
            size_bytes=len(content),
            num_updates=num_updates,
            total_weight=float(num_updates),
        )

    @override
    def track(self, assignment: Assignment) -> None:
        pass  # all open assignments are of the latest version

    @override
    def expect(self, tasks: Sequence[DeviceAssignment]) -> None:
        pass

    @override
    def report(self, task: DeviceAssignment) -> UpdateReported | AssignmentFailed:
        assert self._schema is not None
        name, table = self._tables[task.client]
        try:
            with user_code.wrap_errors(f"{self._wrap}: answer()"):
                reply = self._schema.encode(self._procedure.answer(self.model, table))
        except (errors.ProcedureError, errors.UserCodeError) as exc:
            text = f"site {texts.quote(name)}: {exc}"
            return AssignmentFailed(task.key, task.client_id, states.Reason.TRAINER_ERROR, text)
        self._replies[task.id] = reply
        content = self._schema.write(reply)
        return UpdateReported(task.key, task.client_id, sha256(content).hexdigest(), 1.0, {}, len(content))

    @override
    def drop(self, task: DeviceAssignment) -> None:
        self._replies.pop(task.id, None)

    @override
    def forget(self, key: AttemptKey, client_id: str) -> None:
        name = AssignmentId(key, client_id)
        self._replies.pop(name, None)
        self._folded.pop(name, None)

    @override
    def fold(self, command: commands.Fold) -> None:
        if (reply := self._replies.pop(command.assignment, None)) is not None:  # else its attempt has failed
            self._folded[command.assignment] = reply

    @override
    def restart(self, command: commands.Restart) -> None:
        self._replies |= self._folded
        self._folded = {}

    @override
    def commit(self, command: commands.Commit, job: JobState) -> AttemptAggregated | AggregationFailed:
        assert self._schema is not None
        total = ExactSum(self._schema)
        try:
            for reply in self._folded.values():
                total.add(reply)
            with user_code.wrap_errors(f"{self._wrap}: advance()"):
                after = versions.advance(self._procedure, self._version + 1, self._current.state, total.totals)
        except (errors.ProcedureError, errors.UserCodeError) as exc:
            return AggregationFailed(command.key, str(exc), is_lasting=True)
        cohort = tuple(each.client_id for each in self._folded)
        self._version += 1
        self._begin(after)
        version = self._describe(command.key, len(cohort))
        return AttemptAggregated(command.key, version, {}, () if after.is_result else cohort)

    @override
    def settle(self, key: AttemptKey, version: int | None) -> Mapping[str, float]:
        self._replies, self._folded = {}, {}
        return {}
