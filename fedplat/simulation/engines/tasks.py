"""What engines have in common: the training task, the states of clients, versions in use, and a queue of tasks."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from msgspec import Struct
from typing_extensions import override

from fedplat import errors, model
from fedplat.config import user_code
from fedplat.simulation.data.federation import Federation
from fedplat.simulation.engines.interface import ClientTask, Engine

Contents = Mapping[str, model.Parameters]
"""A client state: parameters by name, as in `ClientState`."""
NO_UPDATE = model.Parameters.from_arrays({})
"""The update of a task that scores."""


class LocalResult(NamedTuple):
    """The result of a task; `contents` is the new client state, or None if it did not change."""

    update: model.Parameters
    metrics: Mapping[str, float]
    contents: Contents | None
    num_examples: float | None = None
    """The client's weight, if it is not the number of its examples."""


class ClientTraining(NamedTuple):
    """The learner, the data and the options of local training.

    For a `fedplat.pytorch.training.Learner` the options are `LocalOptions`; for an `ArrayLearner` a job's `[config]`.
    """

    federation: Federation
    learner: Any
    options: Any
    seed: int = 0
    """The seed of the initial values of clients' personal layers."""
    num_rounds: int = 0
    """The number of rounds of the job; 0 if it is not known."""


def num_examples(federation: Federation, task: ClientTask, reported: float | None = None) -> float:
    """Return the weight that a learner reported for a task, or the number of examples that it trains on or scores."""
    if reported is not None:
        return reported
    return float((federation.num_held_out if task.scores else federation.num_examples)(task.client))


State = TypeVar("State")


class ClientStates(Generic[State]):
    """The state of each client that has one.

    A new state takes effect at once, and can be undone until the client begins its next task. `release` is called with
    each state that is not needed any more.
    """

    def __init__(self, release: Callable[[State], object] = lambda state: None) -> None:
        self._release = release
        self._now: dict[int, State] = {}
        self._before: dict[int, tuple[ClientTask, State | None]] = {}

    def begin(self, task: ClientTask) -> State | None:
        """Return the state that a client begins a task with, or None. The previous task can no longer be undone."""
        _, before = self._before.pop(task.client, (None, None))
        if before is not None:
            self._release(before)
        return self._now.get(task.client)

    def put(self, task: ClientTask, state: State) -> None:
        """Store the state that a task ended with; the one it began with is kept for `undo`."""
        self._before[task.client] = task, self._now.get(task.client)
        self._now[task.client] = state

    def undo(self, task: ClientTask) -> None:
        """Restore the state that a task began with, if the task is the last of its client to have stored one."""
        last, before = self._before.get(task.client, (None, None))
        if last != task:
            return
        del self._before[task.client]
        self._release(self._now.pop(task.client))
        if before is not None:
            self._now[task.client] = before

    def clear(self) -> None:
        """Release all states."""
        for state in (*self._now.values(), *(before for _, before in self._before.values() if before is not None)):
            self._release(state)
        self._now, self._before = {}, {}

    def replace(self, states: Mapping[int, State]) -> None:
        """Replace all states."""
        self.clear()
        self._now.update(states)

    def __iter__(self) -> Iterator[tuple[int, State]]:
        return iter(self._now.items())


class Versions:
    """Counts the tasks in progress of each version; calls `forget` for a retired version when its last task ends."""

    def __init__(self, forget: Callable[[int], object]) -> None:
        self._forget = forget
        self._in_progress: Counter[int] = Counter()
        self._retired: set[int] = set()

    def begin(self, task: ClientTask) -> None:
        """Count a task that has begun."""
        self._in_progress[task.version] += 1

    def end(self, task: ClientTask) -> None:
        """Uncount a task that has its result or was dropped."""
        self._in_progress[task.version] -= 1
        if not self._in_progress[task.version]:
            del self._in_progress[task.version]
            if task.version in self._retired:
                self._retired.remove(task.version)
                self._forget(task.version)

    def retire(self, version: int) -> None:
        """Forget a version that no later task uses, now or when its last task ends."""
        if version in self._in_progress:
            self._retired.add(version)
        else:
            self._forget(version)


class FederationEngine(Engine):
    """What all engines have: the sizes of the clients' data, and the versions in use."""

    _federation: Federation
    _versions: Versions

    @property
    @override
    def num_clients(self) -> int:
        return self._federation.num_clients

    @override
    def num_examples(self, client: int) -> int:
        return self._federation.num_examples(client)

    @override
    def retire(self, version: int) -> None:
        self._versions.retire(version)


class InProcessEngine(FederationEngine):
    """An engine without other processes, which stores the client states as they are."""

    def __init__(self) -> None:
        self._states = ClientStates[Contents]()

    @override
    def client_states(self) -> Mapping[int, Contents]:
        return dict(self._states)

    @override
    def set_client_states(self, client_states: Mapping[int, Contents]) -> None:
        self._states.replace(client_states)

    @override
    def close(self) -> None:
        pass


Answer = TypeVar("Answer")


def make_error(action: str, exc: BaseException) -> errors.FedplatError:
    """Return the error of an action such as `describe_task`, the same in this process and in a worker.

    It is the user's mistake: what an action calls is the learner, on the user's data. An `EngineError` is returned
    unchanged.
    """
    if isinstance(exc, errors.EngineError):
        return exc
    if not isinstance(exc, errors.FedplatError):
        return user_code.make_error(action, exc)
    kind = next((each for each in errors.USAGE_ERRORS if isinstance(exc, each)), errors.UserCodeError)
    return kind(f"{action} failed: {exc}")


class TaskFailure(Struct, frozen=True, array_like=True):
    """An error of a worker process, as a message to its parent."""

    kind: str
    """The name of its class in `fedplat.errors`."""
    text: str

    @classmethod
    def of(cls, action: str, exc: BaseException) -> TaskFailure:
        """Return the failure of an action; its text is cut to what a message can hold."""
        error = make_error(action, exc)
        return cls(type(error).__name__, str(error)[:MAX_FAILURE])

    def error(self) -> errors.FedplatError:
        """Return the error that the parent raises."""
        return getattr(errors, self.kind)(self.text)


SCORING = "the scoring of the model"
"""The action of a model's evaluation on the central test data."""
MAX_FAILURE = 1 << 14
"""The longest error text, in characters."""


def describe_task(task: ClientTask) -> str:
    """Return what a task does, for errors."""
    return f"the {'scoring' if task.scores else 'training'} of client {task.client}"


class WorkQueue(Generic[Answer]):
    """Numbered tasks. The longest is drawn first (Graham 1969), so the tasks that run last are short.

    `versions` counts a task from `begin` until it is fetched or dropped; `num_examples` returns those of a client.
    """

    def __init__(self, versions: Versions, num_examples: Callable[[int], float]) -> None:
        self._versions, self._num_examples = versions, num_examples
        self._count = itertools.count(1)
        self._numbers: dict[ClientTask, int] = {}
        self._waiting: list[tuple[float, int, ClientTask]] = []
        self._answers: dict[int, Answer] = {}
        self._dropped: dict[int, ClientTask] = {}

    def __contains__(self, task: ClientTask) -> bool:
        """Return whether a task was begun, and neither fetched nor dropped."""
        return task in self._numbers

    def new_number(self) -> int:
        """Return a number that no task has, for another kind of request to the workers."""
        return next(self._count)

    def begin(self, tasks: Sequence[ClientTask]) -> None:
        """Add tasks to the queue."""
        for task in tasks:
            number = self._numbers[task] = self.new_number()
            self._versions.begin(task)
            length = task.fraction * self._num_examples(task.client)
            heapq.heappush(self._waiting, (-length, number, task))

    def draw(self) -> tuple[int, ClientTask] | None:
        """Remove and return the next task with its number; None if the queue is empty."""
        while self._waiting:
            _, number, task = heapq.heappop(self._waiting)
            if number not in self._dropped:
                return number, task
            self._versions.end(self._dropped.pop(number))
        return None

    def put(self, number: int, answer: Answer) -> bool:
        """Store the answer to a drawn task; returns False if the task was dropped."""
        if number in self._dropped:
            self._versions.end(self._dropped.pop(number))
            return False
        self._answers[number] = answer
        return True

    def has_answer(self, task: ClientTask) -> bool:
        """Return whether the answer to a task has arrived."""
        return self._numbers[task] in self._answers

    def fetch(self, task: ClientTask) -> Answer:
        """Remove a finished task and return its answer."""
        self._versions.end(task)
        return self._answers.pop(self._numbers.pop(task))

    def drop(self, task: ClientTask) -> Answer | None:
        """Discard a task; returns its answer if that has arrived."""
        number = self._numbers.pop(task)
        if number not in self._answers:
            self._dropped[number] = task
            return None
        self._versions.end(task)
        return self._answers.pop(number)
