"""A Flower app in virtual time: its ServerApp runs between rounds, its ClientApp answers when a client reports.

Each set of messages is a round, as on a server: model version k is the file of the message that the app sends
next, and an update is the file of a reply. The last version is the app's final model.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from hashlib import sha256

from typing_extensions import override

from fedplat import errors, model, report_validation
from fedplat.config import label_expressions
from fedplat.flower import apps, claims, grid
from fedplat.flower.app import FlowerApp
from fedplat.job import JobSpec, build_rule
from fedplat.job.tables import require_flower
from fedplat.rounds import Assignment, AssignmentId, AttemptKey, JobState, ModelVersion, Verdict, commands, states
from fedplat.rounds.events import AssignmentFailed, AttemptAggregated, UpdateRejected, UpdateReported
from fedplat.simulation.clients import Fleet
from fedplat.simulation.clients.device import DeviceAssignment, Sizes
from fedplat.simulation.engines.client_apps import Answers, AppTask
from fedplat.simulation.federated.interface import Report, TrainingModel, make_version_zero
from fedplat.simulation.federated.training import training_seed

MAX_ASKED = 5
"""How often a ServerApp may ask for the clients, at most every half a second, before it is taken to wait for more."""
PAUSE_S = 0.5


@dataclasses.dataclass(frozen=True)
class _Answer:
    reply: grid.NodeReply
    state: bytes


@dataclasses.dataclass(frozen=True)
class ClientFailure:
    """A client whose ClientApp failed, or whose reply was refused."""

    client: int
    text: str


@dataclasses.dataclass
class MessageLog:
    """What happened in a round besides the coordinator's numbers: the message's type, and failures in order."""

    message_type: str
    num_messages: int
    failures: list[ClientFailure] = dataclasses.field(default_factory=list[ClientFailure])


class FlowerTraining(TrainingModel):
    """The messages of an app and the replies of its clients, which `answers` computes."""

    def __init__(self, app: FlowerApp, spec: JobSpec, fleet: Fleet, answers: Answers, seed: int) -> None:
        """Import the ServerApp. Raises `FlowerError`."""
        # Without over-selection the app waits for all replies, so none of those of a moment is superfluous.
        self.one_at_a_time = spec.selection.over_selection > 1.0
        self.log: dict[int, MessageLog] = {}
        """What happened in each round, by its number."""
        self._app, self._answers, self._seed = app, answers, seed
        self._options = require_flower(spec)
        self._claims_rule = build_rule(spec)
        self._nodes = _Nodes(app, _find_clients(fleet, spec.selection.where), fleet.num_clients)
        self._run = apps.ServerAppRun(app, self._nodes.list)
        self._run.grid.name_node = "client {}".format
        self._run.grid.max_weight_factor = self._options.max_weight_factor
        self._sent: grid.MessageSet | None = None
        self._version = 0
        self._tasks: dict[AssignmentId, AppTask] = {}
        self._num_tasks = 0
        self._received: dict[AssignmentId, _Answer] = {}
        self._folded: dict[AssignmentId, _Answer] = {}
        self._states: dict[int, bytes] = {}
        self._metrics: Mapping[str, float] = {}
        self._sizes = Sizes(0.0, 0.0)

    @property
    def final_model(self) -> model.Parameters | None:
        """The arrays that the app's strategy returned at its end, by their names; None if it has returned none."""
        return self._run.final_model

    def close(self) -> None:
        """End the ServerApp."""
        self._run.close()

    @property
    @override
    def sizes(self) -> Sizes:
        return self._sizes

    @override
    def first_version(self) -> ModelVersion:
        return make_version_zero(self._sizes)

    @override
    def warm_start(self, command: commands.RunWarmStart) -> AttemptAggregated:
        return self._advance(command.key)

    @override
    def track(self, assignment: Assignment) -> None:
        pass  # each version is one message, which the open set of messages has

    @override
    def expect(self, tasks: Sequence[DeviceAssignment]) -> None:
        self._answers.begin([self._make_task(task) for task in tasks if task.id not in self._tasks])

    @override
    def report(self, task: DeviceAssignment) -> Report | AssignmentFailed:
        answer = self._answers.result(self._tasks.get(task.id) or self._make_task(task))
        del self._tasks[task.id]
        log = self.log[task.key.round]
        if answer.failure:
            log.failures.append(ClientFailure(task.client, answer.failure))
            return AssignmentFailed(task.key, task.client_id, states.Reason.TRAINER_ERROR, answer.failure)
        reply = model.Parameters.from_bytes(answer.reply)
        found, num_examples, metrics = grid.NodeReply.read(task.client, reply), 1.0, dict[str, float]()
        if found.content is not None:
            num_examples, metrics = claims.read_claims(found.content)
        verdict = self._validate(reply, len(answer.reply), num_examples, metrics)
        if verdict is not None:
            assert verdict.reason is not None
            log.failures.append(ClientFailure(task.client, verdict.text or verdict.reason.value))
            return UpdateRejected(task.key, task.client_id, verdict.reason, verdict.text)
        self._received[task.id] = _Answer(found, answer.state)
        digest = sha256(answer.reply).hexdigest()
        return UpdateReported(task.key, task.client_id, digest, num_examples, metrics, len(answer.reply), 0.0)

    @override
    def drop(self, task: DeviceAssignment) -> None:
        self._received.pop(task.id, None)
        if (begun := self._tasks.pop(task.id, None)) is not None:
            self._answers.drop(begun)

    @override
    def forget(self, key: AttemptKey, client_id: str) -> None:
        name = AssignmentId(key, client_id)
        self._received.pop(name, None)
        self._folded.pop(name, None)

    @override
    def restart(self, command: commands.Restart) -> None:
        self._received |= self._folded
        self._folded = {}

    @override
    def fold(self, command: commands.Fold) -> None:
        if (answer := self._received.pop(command.assignment, None)) is not None:
            self._folded[command.assignment] = answer

    @override
    def commit(self, command: commands.Commit, job: JobState) -> AttemptAggregated:
        assert self._sent is not None
        arrived = {int(each.client_id): answer for each, answer in self._folded.items()}
        failures = job.open_attempt.failures if job.open_attempt is not None else {}
        answers = [arrived[node].reply for node in self._sent.nodes if node in arrived]
        failed = [grid.NodeReply(int(client), None, reason) for client, reason in failures.items()]
        outcome = self._advance(command.key, answers, failed)
        self._states |= {node: answer.state for node, answer in arrived.items() if str(node) not in outcome.refused}
        return outcome

    @override
    def settle(self, key: AttemptKey, version: int | None) -> Mapping[str, float]:
        self._received, self._folded = {}, {}
        return {}

    def _advance(
        self, key: AttemptKey, answers: Sequence[grid.NodeReply] = (), failed: Sequence[grid.NodeReply] = ()
    ) -> AttemptAggregated:
        """Run the ServerApp to its next messages, whose content is the next version, or to its end."""
        self._nodes.begin()
        with self._answers.server():
            message = self._sent = self._run.advance([*answers, *failed])
        unread = {str(answer.node_id): answer.error for answer in answers if answer.content is None}
        refused = {**unread, **{str(node): text for node, text in self._run.grid.refused.items()}}
        if (log := self.log.get(key.round)) is not None:
            log.failures += [ClientFailure(int(client), text) for client, text in refused.items()]
        num_updates = len(answers) - len(refused)
        self._version += 1
        size = self._sizes.model
        if message is not None:
            self._answers.publish(message.file)
            self.log[key.round + 1] = MessageLog(message.message_type, len(message.nodes))
            size = float(message.file.schema.file_size_bytes)
            # The size of replies is not known before: that of the message for training, and next to nothing otherwise.
            self._sizes = Sizes(size, size if message.message_type.startswith("train") else 0.0)
        version = ModelVersion(
            version=self._version,
            round=key.round,
            attempt=key.number,
            digest=f"version-{self._version}",
            size_bytes=int(size),
            num_updates=num_updates,
            total_weight=float(num_updates),
        )
        cohort = () if message is None else tuple(str(node) for node in message.nodes)
        return AttemptAggregated(key, version, self._run.grid.take_metrics() or None, cohort, refused)

    def _make_task(self, task: DeviceAssignment) -> AppTask:
        self._num_tasks += 1
        seed = training_seed(self._seed, task.client, task.number)
        made = AppTask(self._num_tasks, task.client, seed, self._states.get(task.client, b""))
        self._tasks[task.id] = made
        return made

    def _validate(
        self, reply: model.Parameters, num_bytes: int, num_examples: float, metrics: Mapping[str, float]
    ) -> Verdict | None:
        """Return the refusal of a reply, as a server decides it."""
        max_bytes = self._options.max_reply_bytes(int(self._sizes.model))
        if num_bytes > max_bytes:
            text = f"the reply has {num_bytes} bytes; flower.max_reply_mb allows {max_bytes}"
            return Verdict(states.Reason.REJECTED_SCHEMA, text)
        verdict = report_validation.validate_claims(self._claims_rule, num_examples, metrics)
        if not verdict.accepted:
            return verdict
        valid = report_validation.validate_reply(reply, reply.to_blocks(), self._options.array_types)
        return valid if isinstance(valid, Verdict) else None


class _Nodes:
    """The clients that a ServerApp may draw; it is called in the app's threads.

    Their number does not change during a run, so an app that waits for more of them would wait forever.
    """

    def __init__(self, app: FlowerApp, clients: Sequence[int], num_clients: int) -> None:
        self._app, self._clients, self._num_clients = app, clients, num_clients
        self._num_asked, self._since = 0, 0.0

    def begin(self) -> None:
        """Note that the app begins to run."""
        self._num_asked, self._since = 0, time.monotonic()

    def list(self) -> Sequence[int]:
        """Return the clients. Raises `FlowerError` if the app asks for them again and again."""
        self._num_asked += 1
        if self._num_asked >= MAX_ASKED and time.monotonic() - self._since >= self._num_asked * PAUSE_S:
            found, total = len(self._clients), self._num_clients
            some = "" if found == total else ", those that selection.where accepts"
            raise errors.FlowerError(
                f"the ServerApp of {self._app.name} waits for more clients than there are ({found}{some}); expected at "
                "most as many in its strategy (min_available_nodes, min_train_nodes, min_evaluate_nodes), or "
                "--num-clients with more"
            )
        return self._clients


def _find_clients(fleet: Fleet, where: str) -> list[int]:
    """Return the clients whose labels satisfy an expression."""
    accepts = label_expressions.compile_expression(where)
    return [client for client in range(fleet.num_clients) if accepts(fleet.labels_of(client))]
