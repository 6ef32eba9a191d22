"""Real training in virtual time: an engine's updates, aggregated by the job's rule and codecs as the server does it."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from fedplat import report_validation
from fedplat.aggregate import Accumulator, Rule, State, rebase, seed_of
from fedplat.codecs.container import Format
from fedplat.errors import CodecError, FedplatError
from fedplat.job import JobSpec, build_rule
from fedplat.model import Parameters, Values, Vector
from fedplat.privacy import KEY_BYTES, Noise
from fedplat.rounds import AssignmentId, AttemptKey, JobState, ModelVersion, Verdict, influence
from fedplat.rounds.commands import Commit, Fold, Restart
from fedplat.rounds.events import AggregationFailed, AttemptAggregated, UpdateRejected, UpdateReported
from fedplat.rounds.states import AttemptKind
from fedplat.simulation.clients.device import DeviceAssignment, Sizes
from fedplat.simulation.engines.interface import Engine, LocalUpdate, Work
from fedplat.simulation.federated.interface import Report
from fedplat.simulation.federated.retention import VersionRetention

_TRAINING, _CODEC, _NOISE = 1, 2, 3


@dataclasses.dataclass(frozen=True)
class _Update:
    """What a client has sent, the work that it came from, and what the client's codec has left out."""

    values: Values
    work: Work
    left_out: Vector | None


@dataclasses.dataclass
class _Sum:
    """What is held for an attempt that has not ended. `made` is its version, once it is computed.

    `folded` are its updates, in their order.
    """

    accumulator: Accumulator
    rule: Rule
    payloads: list[bytes]
    folded: dict[AssignmentId, _Update] = dataclasses.field(default_factory=dict[AssignmentId, _Update])
    made: tuple[Parameters, State] | None = None


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """What a job is after a version was committed, while no update is on its way: a run can go on from here.

    `models` are the versions that clients at work began with, and the latest; `step` the size of its encoded step, if
    there is one. The rest is what the rule, the clients' codecs and the clients remember.
    """

    version: int
    models: Mapping[int, Parameters]
    state: State
    scalars: Mapping[str, float]
    residuals: Mapping[int, Vector]
    memories: Mapping[int, Mapping[str, Parameters]]
    step: float | None


class FederatedLearning:
    """A job's models, and its clients' updates; see `Training` for what each method is asked."""

    one_at_a_time = True

    def __init__(self, spec: JobSpec, engine: Engine, initial: Parameters, seed: int) -> None:
        self.model = initial
        self._spec, self._engine, self._seed = spec, engine, seed
        self._plain = build_rule(spec)
        uplink = spec.compression.uplink
        self._format = Format(uplink, initial.schema) if uplink is not None else None
        self._residuals: dict[int, Vector] = {}
        self._sums: dict[AttemptKey, _Sum] = {}
        self._received: dict[AssignmentId, _Update] = {}
        self._keeper = VersionRetention() if influence.may_refold(spec) else None
        self._users: Counter[int] = Counter()
        self._models: dict[int, Parameters] = {}
        self._version = 0
        size = float(initial.schema.file_size_bytes)
        self.sizes = Sizes(size, float(self._format.max_bytes) if self._format is not None else size)
        rule, _ = self._rule(AttemptKey(spec.name, 0, 0))
        self._state: State = rule.init(initial.schema.num_floating)
        self._scalars: Mapping[str, float] = {}

    def first_version(self) -> ModelVersion:
        """See `Training`."""
        self._publish(0, self.model)
        return self.version_zero()

    def version_zero(self) -> ModelVersion:
        """The initial model's record, before anybody can train on it."""
        return ModelVersion(version=0, round=0, attempt=0, digest="version-0", size_bytes=int(self.sizes.model))

    def expect(self, tasks: Sequence[DeviceAssignment]) -> None:
        """See `Training`."""
        works: list[Work] = []
        for task in tasks:
            if task.work is None:
                task.work = self._work(task)
                works.append(task.work)
        if works:
            self._engine.begin(works)

    def report(self, task: DeviceAssignment) -> Report:
        """See `Training`."""
        self.expect([task])
        assert task.work is not None
        trained = self._engine.result(task.work)
        verdict = report_validation.validate_claims(self._plain, task.kind, trained.num_examples, trained.metrics)
        if task.kind is AttemptKind.EVALUATE:
            return self._report_scores(task, trained, verdict)
        if verdict.accepted:
            verdict = report_validation.validate_schema(trained.update.schema, self.model.schema)
        if not verdict.accepted:
            return _reject(task, verdict)
        values, left_out, size = self._send(task, trained.update)
        norm = report_validation.measure_norm(values.to_blocks())
        if isinstance(norm, Verdict):
            return _reject(task, norm)
        self._received[task.id] = _Update(values, task.work, left_out)
        digest = f"update {task.client} {task.number}"
        return UpdateReported(task.key, task.client_id, digest, trained.num_examples, trained.metrics, size, norm)

    def drop(self, task: DeviceAssignment) -> None:
        """See `Training`."""
        if task.work is not None:
            self._received.pop(task.id, None)
            self._drop(task.work)
            task.work = None

    def forget(self, key: AttemptKey, client_id: str) -> None:
        """See `Training`."""
        name = AssignmentId(key, client_id)
        update = self._received.pop(name, None)
        for found in self._sums.values():
            if update is None and (update := found.folded.pop(name, None)) is not None:
                self._free(update)
        if update is not None:
            self._drop(update.work)

    def restart(self, command: Restart) -> None:
        """See `Training`."""
        if (found := self._sums.pop(command.key, None)) is not None:
            self._received |= found.folded

    def fold(self, command: Fold) -> AggregationFailed | None:
        """See `Training`."""
        found = self._sum(command.key)
        update = self._received.pop(command.assignment, None)
        if update is None:  # dropped at the close of the attempt, in this very batch
            return None
        values, began_with = update.values, update.work.version
        if found.rule.from_latest and began_with != self._version:
            values = rebase(values, self._models[began_with], self.model)
        kept = _NOTHING if self._keeper is None else self._keeper.keep(update.values)
        found.folded[command.assignment] = dataclasses.replace(update, values=kept)
        try:
            with np.errstate(over="ignore", invalid="ignore"):  # the end looks at the sum
                found.accumulator.fold(values, command.contribution)
        except (FedplatError, ValueError) as exc:
            return AggregationFailed(command.key, str(exc))
        return None

    def commit(self, command: Commit, job: JobState) -> AttemptAggregated | AggregationFailed:
        """See `Training`."""
        found = self._sum(command.key)
        try:
            found.made = found.accumulator.finish(self.model, self._state)
        except (FedplatError, ValueError) as exc:
            return AggregationFailed(command.key, str(exc))
        number = job.latest.version + 1
        version = ModelVersion(
            version=number,
            round=command.key.round,
            attempt=command.key.number,
            digest=f"version-{number}",
            size_bytes=int(self.sizes.model),
            delta_size_bytes=len(found.payloads[-1]) if found.payloads else 0,
            num_updates=found.accumulator.num_updates,
            total_weight=found.accumulator.total_weight,
        )
        return AttemptAggregated(command.key, version, found.accumulator.published)

    def settle(self, key: AttemptKey, version: int | None) -> Mapping[str, float]:
        """See `Training`."""
        found = self._sums.pop(key, None)
        if found is None:
            return {}
        if version is None or found.made is None:
            for update in found.folded.values():
                self._free(update)
                self._drop(update.work)
            return {}
        for update in found.folded.values():
            self._free(update)
            self._release(update.work.version)
            if update.left_out is not None:
                self._residuals[update.work.client] = update.left_out
        before, self._version = self._version, version
        self.model, self._state = found.made
        self._scalars = found.accumulator.scalars
        self._publish(version, self.model)
        if not self._users[before]:
            self._retire(before)
        if found.payloads:
            self.sizes = self.sizes._replace(step=float(len(found.payloads[-1])))
        if self._spec.evaluation.is_due(key.round, self._spec.rounds):
            return self._engine.evaluate(self.model)
        return {}

    def snapshot(self) -> Snapshot | None:
        """What a run could go on from now; None while updates are on their way into a version."""
        if self._received or self._sums:
            return None
        return Snapshot(
            version=self._version,
            models=dict(self._models),
            state=self._state,
            scalars=self._scalars,
            residuals=dict(self._residuals),
            memories=self._engine.memories(),
            step=self.sizes.step,
        )

    def restore(self, snapshot: Snapshot, tasks: Sequence[DeviceAssignment]) -> None:
        """Goes on from a snapshot; `tasks` are those under way whose reports will matter."""
        self._version, self.model = snapshot.version, snapshot.models[snapshot.version]
        self._state, self._scalars = snapshot.state, snapshot.scalars
        self._residuals = dict(snapshot.residuals)
        self.sizes = self.sizes._replace(step=snapshot.step)
        self._engine.remember(snapshot.memories)
        for version, model in sorted(snapshot.models.items()):
            self._publish(version, model)
        self.expect(tasks)

    def _work(self, task: DeviceAssignment) -> Work:
        self._users[task.version] += 1
        if task.kind is AttemptKind.EVALUATE:
            return Work(task.client, task.version, seed=0, scores=True)
        entropy = np.random.SeedSequence([self._seed, _TRAINING, task.client, task.number])
        return Work(task.client, task.version, int(entropy.generate_state(1, np.uint64)[0]), task.fraction)

    def _report_scores(self, task: DeviceAssignment, trained: LocalUpdate, verdict: Verdict) -> Report:
        """Return the report of an evaluation, with which the client's work is over."""
        self._release(task.version)
        task.work = None
        if not verdict.accepted:
            return _reject(task, verdict)
        return UpdateReported(task.key, task.client_id, "", trained.num_examples, trained.metrics)

    def _free(self, update: _Update) -> None:
        if self._keeper is not None:
            self._keeper.drop(update.values)

    def _drop(self, work: Work) -> None:
        self._engine.drop(work)
        self._release(work.version)

    def _release(self, version: int) -> None:
        """One work less begins, or has begun, with a version."""
        self._users[version] -= 1
        if not self._users[version] and version != self._version:
            self._retire(version)

    def _publish(self, version: int, model: Parameters) -> None:
        self._models[version] = model
        self._engine.publish(version, model)

    def _retire(self, version: int) -> None:
        del self._models[version], self._users[version]
        self._engine.retire(version)

    def _sum(self, key: AttemptKey) -> _Sum:
        """What is held for an attempt; from its beginning on if it is not known yet."""
        found = self._sums.get(key)
        if found is None:
            rule, payloads = self._rule(key)
            found = self._sums[key] = _Sum(Accumulator(self.model.schema, rule, self._scalars), rule, payloads)
        return found

    def _rule(self, key: AttemptKey) -> tuple[Rule, list[bytes]]:
        """The job's rule in an attempt, and where it puts its encoded steps if the job has a downlink."""
        seed, payloads = seed_of(self._spec.name, self._version + 1), list[bytes]()
        # Of the run's seed, so that it can be repeated: noise of a simulation keeps nothing secret.
        entropy = np.random.SeedSequence([self._seed, _NOISE, key.round, key.number])
        noise = Noise(entropy.generate_state(KEY_BYTES // 8, np.uint64).tobytes())
        return build_rule(self._spec, seed, noise, payloads.append), payloads

    def _send(self, task: DeviceAssignment, update: Parameters) -> tuple[Values, Vector | None, int]:
        """Return the update as the server has it, what the codec has left out of it, and how many bytes were sent."""
        format = self._format
        if format is None:
            return update, None, update.schema.file_size_bytes
        rng = np.random.default_rng(np.random.SeedSequence([self._seed, _CODEC, task.client, task.number]))
        left_out: Vector | None = None
        try:
            if format.needs_feedback:
                pieces, left_out = format.encode_with_feedback(update, self._residuals.get(task.client), rng)
            else:
                pieces = format.encode(update, rng)
            content = b"".join(pieces)
        except CodecError:  # it is not finite, and that is what the server would say
            return update, None, 0
        return format.decode(content), left_out, len(content)


def _reject(task: DeviceAssignment, verdict: Verdict) -> UpdateRejected:
    assert verdict.reason is not None
    return UpdateRejected(task.key, task.client_id, verdict.reason, verdict.text)


_NOTHING = Parameters.from_arrays({})
"""Stands for values that were folded: only their work is of interest from then on."""
