"""Real training in virtual time: an engine's updates, encoded and aggregated as the server does it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
from typing_extensions import override

from fedplat import errors, privacy, report_validation
from fedplat.aggregate import Accumulator, Rule, State, columns_of, rebase, seed_of
from fedplat.codecs.container import Format
from fedplat.config import plugins, user_code
from fedplat.job import JobSpec, build_rule
from fedplat.model import Parameters, Values, Vector
from fedplat.model.turns import spread
from fedplat.rounds import Assignment, AssignmentId, Attempt, AttemptKey, JobState, ModelVersion, Verdict, influence
from fedplat.rounds.commands import Commit, Fold, Restart
from fedplat.rounds.events import AggregationFailed, AttemptAggregated, UpdateRejected, UpdateReported
from fedplat.secure_aggregation.encoding import Decoded
from fedplat.simulation.clients.device import DeviceAssignment, Sizes
from fedplat.simulation.engines.interface import ClientTask, Engine, LocalUpdate
from fedplat.simulation.federated.interface import (
    BaseModels,
    Report,
    Snapshot,
    TrainingModel,
    UpdateRetention,
    make_version_zero,
)
from fedplat.simulation.secure.groups import SecureProtocol
from fedplat.simulation.secure.sums import MaskedUpdates

_TRAINING, _CODEC, _NOISE = 1, 2, 3


@dataclasses.dataclass(frozen=True)
class _Update:
    """A received update, its training task, and the residual of the client's codec."""

    values: Values
    task: ClientTask
    residual: Vector | None


@dataclasses.dataclass
class _OpenAttempt:
    """The aggregation of an attempt: `folded` has its updates in order.

    Once it is computed, `result` is its version and `memory` that of the rule.
    """

    accumulator: Accumulator
    rule: Rule
    payloads: list[bytes]
    memory: bytes = b""
    folded: dict[AssignmentId, _Update] = dataclasses.field(default_factory=dict[AssignmentId, _Update])
    result: tuple[Parameters, State] | None = None


class RealTraining(TrainingModel):
    """The models of a job and the updates of its clients, which `engine` trains."""

    one_at_a_time = True

    def __init__(
        self, spec: JobSpec, engine: Engine, initial: Parameters, seed: int, protocol: SecureProtocol | None = None
    ) -> None:
        """Begin a job. With a `protocol` clients mask their updates, as secure aggregation needs it."""
        self.model = initial
        self._spec, self._engine, self._seed = spec, engine, seed
        self._claims_rule = build_rule(spec)
        uplink = spec.compression.uplink
        self._format = Format(uplink, initial.schema) if uplink is not None else None
        self._residuals: dict[int, Vector] = {}
        self._attempts: dict[AttemptKey, _OpenAttempt] = {}
        self._received: dict[AssignmentId, _Update] = {}
        self._retention = UpdateRetention() if influence.may_need_refold(spec) else None
        self._models = BaseModels(engine)
        self._masked: MaskedUpdates | None = None
        if protocol is not None:
            self._masked = MaskedUpdates(spec, initial.schema, seed, protocol)
        self._sizes = self._first_sizes(initial)
        rule, _ = self._build_rule(AttemptKey(spec.name, 0, 0))
        self._state: State = rule.init(initial.schema.num_floating)
        self._scalars: Mapping[str, float] = {}
        self._memory = b""

    @property
    @override
    def sizes(self) -> Sizes:
        return self._sizes

    @override
    def update_bytes(self, round: int) -> float:
        if self._masked is not None:
            return float(self._masked.file_bytes(round))
        turn = self._spec.turn(round)
        return float(turn.select_uploaded(self.model.schema).file_size_bytes) if turn.groups else self._sizes.update

    @override
    def num_entries(self, round: int) -> int:
        return self._spec.turn(round).select_uploaded(self.model.schema).num_floating

    @override
    def begin_step(self, attempt: Attempt) -> None:
        assert self._masked is not None
        self._masked.begin_step(attempt)

    @override
    def take_step(self, task: DeviceAssignment) -> bytes:
        assert self._masked is not None
        return self._masked.take_step(task)

    @override
    def first_version(self) -> ModelVersion:
        self._models.commit(0, self.model)
        return self.version_zero()

    def version_zero(self) -> ModelVersion:
        """Return the record of the initial model without making the model available to clients."""
        return make_version_zero(self._sizes)

    @override
    def track(self, assignment: Assignment) -> None:
        self._models.track(assignment)

    @override
    def expect(self, tasks: Sequence[DeviceAssignment]) -> None:
        client_tasks: list[ClientTask] = []
        for task in tasks:
            if task.client_task is None:
                task.client_task = self._make_client_task(task)
                client_tasks.append(task.client_task)
        if client_tasks:
            self._engine.begin(client_tasks)

    @override
    def report(self, task: DeviceAssignment) -> Report:
        self.expect([task])
        assert task.client_task is not None
        trained = self._engine.result(task.client_task)
        rule = self._claims_rule if task.trains else None
        verdict = report_validation.validate_claims(rule, trained.num_examples, trained.metrics)
        if not task.trains:
            return self._report_scores(task, trained, verdict)
        if verdict.accepted:
            verdict = report_validation.validate_schema(trained.update.schema, self.model.schema.uploaded)
        if not verdict.accepted:
            return _reject(task, verdict)
        if self._masked is not None:
            self._received[task.id] = _Update(_NOTHING, task.client_task, None)
            return self._masked.report(task, trained)
        update = self._spec.turn(task.key.round).leave_out(trained.update)
        values, residual, size = self._encode(task, update)
        norm = report_validation.measure_norm(values.to_blocks())
        if isinstance(norm, Verdict):
            return _reject(task, norm)
        values = spread(values, self.model.schema.uploaded) if update is not trained.update else values
        self._received[task.id] = _Update(values, task.client_task, residual)
        digest = f"update {task.client} {task.number}"
        return UpdateReported(task.key, task.client_id, digest, trained.num_examples, trained.metrics, size, norm)

    @override
    def drop(self, task: DeviceAssignment) -> None:
        if self._masked is not None:
            self._masked.forget(task.id)
        if task.client_task is not None:
            self._received.pop(task.id, None)
            self._drop(task.client_task)
            task.client_task = None

    @override
    def forget(self, key: AttemptKey, client_id: str) -> None:
        name = AssignmentId(key, client_id)
        update = self._received.pop(name, None)
        for attempt in self._attempts.values():
            if update is None and (update := attempt.folded.pop(name, None)) is not None:
                self._free(update)
        if update is not None:
            self._drop(update.task)

    @override
    def restart(self, command: Restart) -> None:
        if (attempt := self._attempts.pop(command.key, None)) is not None:
            self._received |= attempt.folded

    @override
    def fold(self, command: Fold) -> AggregationFailed | None:
        attempt = self._open_attempt(command.key)
        update = self._received.pop(command.assignment, None)
        if update is None:  # dropped when the attempt closed, in the same batch
            return None
        if self._masked is not None:
            self._masked.fold(command.key, command.assignment)
            attempt.folded[command.assignment] = update
            return None
        values, base_version = update.values, update.task.version
        if attempt.rule.from_latest and base_version != self._models.latest:
            values = rebase(values, self._models[base_version], self.model)
        kept = _NOTHING if self._retention is None else self._retention.keep(update.values)
        attempt.folded[command.assignment] = dataclasses.replace(update, values=kept)
        try:
            with np.errstate(over="ignore", invalid="ignore"):  # `finish` checks the sum
                attempt.accumulator.fold(values, command.contribution)
        except Exception as exc:
            return self._fail(command.key, exc)
        return None

    @override
    def commit(self, command: Commit, job: JobState) -> AttemptAggregated | AggregationFailed:
        attempt = self._open_attempt(command.key)
        decoded: Decoded | None = None
        try:
            if self._masked is not None:
                decoded = self._masked.fold_mean(attempt.accumulator, job, self.model)
            reduced = attempt.accumulator.reduce_updates(
                columns_of(self._state, self.model.schema.num_floating), self.model
            )
            attempt.result, attempt.memory = reduced.finish(self.model, self._state), reduced.memory
        except Exception as exc:
            return self._fail(command.key, exc)
        number = job.latest.version + 1
        version = ModelVersion(
            version=number,
            round=command.key.round,
            attempt=command.key.number,
            digest=f"version-{number}",
            size_bytes=int(self._sizes.model),
            delta_size_bytes=len(attempt.payloads[-1]) if attempt.payloads else 0,
            num_updates=attempt.accumulator.num_updates if decoded is None else decoded.num_survivors,
            total_weight=attempt.accumulator.total_weight if decoded is None else decoded.weight,
        )
        published = attempt.accumulator.published if decoded is None else decoded.metrics
        return AttemptAggregated(command.key, version, published)

    def _fail(self, key: AttemptKey, exc: Exception) -> AggregationFailed:
        """Return the failure of an attempt, or raise it if it is a mistake in code or an installation."""
        rule = f'aggregation.rule = "{plugins.name_of(self._spec.aggregation)}"'
        if isinstance(exc, errors.PluginError | errors.UserCodeError | errors.MissingExtraError):
            raise exc
        if not isinstance(exc, errors.FedplatError | ValueError):
            with user_code.wrap_errors(rule):
                raise exc
        return AggregationFailed(key, f"{rule}: {exc}", is_lasting=True)

    @override
    def settle(self, key: AttemptKey, version: int | None) -> Mapping[str, float]:
        attempt = self._attempts.pop(key, None)
        if self._masked is not None:
            self._masked.settle(key, attempt.folded if attempt is not None else ())
        if attempt is None:
            return {}
        if version is None or attempt.result is None:
            for update in attempt.folded.values():
                self._free(update)
                self._drop(update.task)
            return {}
        for update in attempt.folded.values():
            self._free(update)
            self._models.end_task(update.task.version)
            if update.residual is not None:
                self._residuals[update.task.client] = update.residual
        self.model, self._state = attempt.result
        self._scalars, self._memory = attempt.accumulator.scalars, attempt.memory
        self._models.commit(version, self.model)
        if attempt.payloads:
            self._sizes = self._sizes._replace(step=float(len(attempt.payloads[-1])))
        if self._spec.evaluation.is_due(key.round, self._spec.rounds):
            return self._engine.evaluate(self.model)
        return {}

    def snapshot(self) -> Snapshot | None:
        """Return a state that a run can resume from; None while updates wait to be part of a version."""
        if self._received or self._attempts:
            return None
        return Snapshot(
            version=self._models.latest,
            models=self._models.to_dict(),
            state=self._state,
            scalars=self._scalars,
            memory=self._memory,
            residuals=dict(self._residuals),
            client_states=self._engine.client_states(),
            step=self._sizes.step,
        )

    def restore(self, snapshot: Snapshot, tasks: Sequence[DeviceAssignment]) -> None:
        """Restore a snapshot; `tasks` are those in progress whose reports are expected to matter."""
        self.model = snapshot.models[snapshot.version]
        self._state, self._scalars, self._memory = snapshot.state, snapshot.scalars, snapshot.memory
        self._residuals = dict(snapshot.residuals)
        self._sizes = self._sizes._replace(step=snapshot.step)
        self._engine.set_client_states(snapshot.client_states)
        self._models.restore(snapshot.version, snapshot.models)
        self.expect(tasks)

    def _make_client_task(self, task: DeviceAssignment) -> ClientTask:
        self._models.begin_task(task.version)
        if not task.trains:
            return ClientTask(task.client, task.version, seed=0, scores=True)
        return ClientTask(task.client, task.version, training_seed(self._seed, task.client, task.number), task.fraction)

    def _report_scores(self, task: DeviceAssignment, trained: LocalUpdate, verdict: Verdict) -> Report:
        """Return the report of an evaluation, which ends the client's task."""
        self._models.end_task(task.version)
        task.client_task = None
        if not verdict.accepted:
            return _reject(task, verdict)
        return UpdateReported(task.key, task.client_id, "", trained.num_examples, trained.metrics)

    def _first_sizes(self, initial: Parameters) -> Sizes:
        size, sent = float(initial.schema.file_size_bytes), float(initial.schema.uploaded.file_size_bytes)
        if self._masked is not None:
            return Sizes(size, float(self._masked.file_bytes(1)))
        return Sizes(size, float(self._format.max_bytes) if self._format is not None else sent)

    def _free(self, update: _Update) -> None:
        if self._retention is not None:
            self._retention.drop(update.values)

    def _drop(self, task: ClientTask) -> None:
        self._engine.drop(task)
        self._models.end_task(task.version)

    def _open_attempt(self, key: AttemptKey) -> _OpenAttempt:
        """Return the aggregation of an attempt; creates it at the first call."""
        attempt = self._attempts.get(key)
        if attempt is None:
            rule, payloads = self._build_rule(key)
            accumulator = Accumulator(self.model.schema, rule, self._scalars, memory=self._memory)
            attempt = self._attempts[key] = _OpenAttempt(accumulator, rule, payloads)
        return attempt

    def _build_rule(self, key: AttemptKey) -> tuple[Rule, list[bytes]]:
        """Return the job's rule for an attempt, and the list that it adds encoded steps to (with a downlink codec)."""
        seed, payloads = seed_of(self._spec.name, self._models.latest + 1), list[bytes]()
        # The noise follows from the run's seed, so that runs are repeatable: a simulation protects no one's data.
        entropy = np.random.SeedSequence([self._seed, _NOISE, key.round, key.number])
        noise = privacy.Noise(entropy.generate_state(privacy.KEY_BYTES // 8, np.uint64).tobytes())
        return build_rule(self._spec, seed, noise, payloads.append, key.round), payloads

    def _encode(self, task: DeviceAssignment, update: Parameters) -> tuple[Values, Vector | None, int]:
        """Return the update as the server receives it, the codec's residual, and the number of bytes sent."""
        format = self._format
        if format is None:
            return update, None, update.schema.file_size_bytes
        rng = np.random.default_rng(np.random.SeedSequence([self._seed, _CODEC, task.client, task.number]))
        residual: Vector | None = None
        try:
            if format.needs_feedback:
                pieces, residual = format.encode_with_feedback(update, self._residuals.get(task.client), rng)
            else:
                pieces = format.encode(update, rng)
            content = b"".join(pieces)
        except errors.CodecError:  # the update is not finite: the server's norm check rejects it
            return update, None, 0
        return format.decode(content), residual, len(content)


def _reject(task: DeviceAssignment, verdict: Verdict) -> UpdateRejected:
    assert verdict.reason is not None
    return UpdateRejected(task.key, task.client_id, verdict.reason, verdict.text)


_NOTHING = Parameters.from_arrays({})
"""A placeholder for the values of folded updates that cannot be folded again: only their task is needed."""


def training_seed(seed: int, client: int, number: int) -> int:
    """Return the seed of a client's training in a simulation; `number` counts the client's assignments."""
    return int(np.random.SeedSequence([seed, _TRAINING, client, number]).generate_state(1, np.uint64)[0])
