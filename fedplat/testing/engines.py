"""The checks of training engines, on six clients with data of different sizes (extra "torch").

An engine computes what clients in the field compute: `fedplat.pytorch.training.train`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import cast

import numpy as np
import torch
from torch import nn

from fedplat import client_state, errors
from fedplat.model import Parameters
from fedplat.pytorch.training import Learner, LocalOptions, LocalTraining, TensorExamples, Trainee, evaluate, train
from fedplat.simulation.data import Federation
from fedplat.simulation.engines.client_trainer import ClientTraining, one_thread
from fedplat.simulation.engines.interface import ClientTask, Engine, LocalUpdate
from fedplat.simulation.engines.registry import EngineOptions, open_engine
from fedplat.testing.errors import adopt, run_checks

SIZES = (23, 5, 10, 31, 1, 12)
"""Examples of the clients: more and less than a batch of 10, and a single one."""
NUM_TEST, NUM_INPUTS, NUM_CLASSES = 40, 8, 4
WORKS = [
    [ClientTask(client, version, 100 * version + client, 0.5 if client == 3 else 1.0) for client in range(len(SIZES))]
    for version in (0, 1, 2)
]
"""Three rounds of all clients, one of which has time for half of its steps."""
ROUNDING, METRIC_ROUNDING = 1e-6, 1e-5


def make_module() -> nn.Module:
    """Create a small network."""
    return nn.Sequential(nn.Linear(NUM_INPUTS, 20), nn.ReLU(), nn.Linear(20, NUM_CLASSES))


def make_task(personal: tuple[str, ...] = ()) -> ClientTraining:
    """Return the training of all clients, with personal layers or without."""
    rng = np.random.default_rng(0)
    total = sum(SIZES)
    inputs = rng.standard_normal((total + NUM_TEST, NUM_INPUTS), dtype=np.float32)
    targets = rng.integers(0, NUM_CLASSES, total + NUM_TEST)
    parts = np.split(rng.permutation(total), np.cumsum(SIZES)[:-1])
    held_out = [total + np.arange(1 + client % 4) for client in range(len(SIZES))]
    data = Federation(inputs, targets, parts, inputs[total:], targets[total:], held_out=held_out)
    options = LocalOptions.from_config({"epochs": 2, "batch_size": 10, "learning_rate": 0.1, "momentum": 0.5})
    return ClientTraining(data, Learner(model=make_module, personal=personal), options)


@dataclasses.dataclass(frozen=True)
class EngineUnderTest:
    """An engine, created again for each check."""

    options: EngineOptions
    num_workers: int

    @contextlib.contextmanager
    def open(self, task: ClientTraining) -> Generator[Engine]:
        """Create the engine, and close it at the end."""
        with contextlib.closing(open_engine(self.options, task, self.num_workers)) as engine:
            yield engine


class FieldClients:
    """Clients that train and score as the client SDK does."""

    def __init__(self, task: ClientTraining) -> None:
        self._task = task
        self._trainee = Trainee(cast(Learner, task.learner), seed=task.seed)
        self._states: dict[int, client_state.ClientState] = {}

    def train(self, model: Parameters, task: ClientTask) -> LocalUpdate:
        """Return the update of a client, and store its state."""
        state = self._states.get(task.client, client_state.ClientState())
        inputs, targets = map(torch.from_numpy, self._task.federation.examples(task.client))
        parameters = model.copy()
        training = LocalTraining(
            examples=TensorExamples(inputs, targets),
            options=cast(LocalOptions, self._task.options),
            seed=task.seed,
            round_number=task.version + 1,
            fraction=task.fraction,
            client_state=state,
            noise_seed=task.seed,
        )
        metrics = train(self._trainee, parameters, training)
        self._states[task.client] = client_state.ClientState(state.contents)
        return LocalUpdate(parameters.minus(model), len(targets), metrics)

    def score(self, model: Parameters, task: ClientTask) -> LocalUpdate:
        """Return the scores of a model on the held-out examples of a client."""
        data = self._task.federation
        part = data.held_out[task.client]
        examples = TensorExamples(torch.from_numpy(data.inputs[part]), torch.from_numpy(data.targets[part]))
        state = self._states.get(task.client, client_state.ClientState())
        scores = evaluate(self._trainee, model, examples, client_state=state)
        return LocalUpdate(Parameters.from_arrays({}), len(part), scores)

    def evaluate(self, model: Parameters) -> dict[str, float]:
        """Return the scores of a model on the central test data."""
        data = self._task.federation
        return evaluate(
            self._trainee, model, TensorExamples(*map(torch.from_numpy, (data.test_inputs, data.test_targets)))
        )


def check(options: EngineOptions, num_workers: int) -> None:
    """Check an engine: see `fedplat.testing.check_engine`."""
    with one_thread():  # threads that wait for each other on busy cores make small matrices many times slower
        run_checks(CHECKS, EngineUnderTest(adopt(options, EngineOptions), num_workers))


def run_tasks(engine: Engine, version: int, model: Parameters, tasks: Sequence[ClientTask]) -> list[LocalUpdate]:
    """Return the results of one round, in the order of the tasks."""
    engine.publish(version, model)
    engine.begin(tasks)
    found = [engine.result(task) for task in tasks]
    engine.retire(version)
    return found


def check_clients_and_examples_are_those_of_the_data(tested: EngineUnderTest) -> Iterator[str]:
    """Require the numbers of which durations and weights are computed."""
    with tested.open(make_task()) as engine:
        found = [engine.num_examples(client) for client in range(engine.num_clients)]
    if found != list(SIZES):
        yield f"num_examples() of all clients returns {found}; expected {list(SIZES)}"


def check_training_equals_that_of_clients_in_the_field(tested: EngineUnderTest) -> Iterator[str]:
    """Require the updates and metrics of real clients for three rounds, also with personal layers."""
    for personal in ((), ("2.*",)):
        task = make_task(personal)
        model, clients = task.learner.initial(), FieldClients(task)
        with tested.open(task) as engine:
            for version, cohort in enumerate(WORKS):
                found = run_tasks(engine, version, model, cohort)
                for each, update in zip(cohort, found, strict=True):
                    if difference := _difference(update, clients.train(model, each)):
                        yield (
                            f"client {each.client} in round {version + 1}{' with personal layers' * bool(personal)}: "
                            f"{difference}"
                        )
                        return
                for update in found:
                    model = model.plus(update.update.to_vector() / np.float32(len(found)))


def check_the_order_of_results_changes_nothing(tested: EngineUnderTest) -> Iterator[str]:
    """Require the same bits whenever and in whatever order results are fetched."""
    task = make_task()
    model = task.learner.initial()
    with tested.open(task) as engine:
        forwards = run_tasks(engine, 0, model, WORKS[0])
    with tested.open(task) as engine:
        backwards = run_tasks(engine, 0, model, WORKS[0][::-1])[::-1]
    if any(one.update != other.update for one, other in zip(forwards, backwards, strict=True)):
        yield "the updates have other bits if their results are fetched in reverse order"


def check_retired_versions_serve_their_tasks(tested: EngineUnderTest) -> Iterator[str]:
    """Require that tasks in progress use their version after it was retired, and later ones the next."""
    task = make_task()
    model = task.learner.initial()
    later = ClientTask(0, 1, 7)
    with tested.open(task) as engine:
        expected = run_tasks(engine, 0, model, WORKS[0])
    with tested.open(task) as engine:
        engine.publish(0, model)
        engine.begin(WORKS[0])
        engine.retire(0)
        engine.publish(1, model.plus(np.ones(model.schema.num_floating, np.float32)))
        engine.begin([later])
        found = [engine.result(each) for each in WORKS[0]]
        last = engine.result(later)
    differences = [_difference(one, other) for one, other in zip(found, expected, strict=True)]
    if any(differences):
        yield f"after retire() of a version, a task that began with it differs: {next(filter(None, differences))}"
    if last.update == expected[0].update:
        yield "a task of the second version has the update of the first"


def check_dropped_tasks_leave_no_state(tested: EngineUnderTest) -> Iterator[str]:
    """Require that `drop` restores the client's state, before and after the result was fetched, and that it resumes."""
    task = make_task(("2.*",))
    model = task.learner.initial()
    first, second, third = (ClientTask(0, 0, seed) for seed in range(3))
    with tested.open(task) as engine:
        engine.publish(0, model)
        engine.begin([first])
        engine.result(first)
        before = dict(engine.client_states())
        if list(before) != [0]:
            yield f"client_states() has the clients {sorted(before)}; expected client 0, the only one with a state"
            return
        for fetches in (True, False):
            engine.begin([second])
            if fetches:
                engine.result(second)
            engine.drop(second)
            if engine.client_states() != before:
                moment = "after" if fetches else "before"
                yield f"drop() {moment} result() changes the client's state; expected no change"
                return
        engine.begin([third])
        expected = engine.result(third)
    with tested.open(task) as resumed:
        resumed.set_client_states(before)
        resumed.publish(0, model)
        resumed.begin([third])
        if resumed.result(third).update != expected.update:
            yield "with the states of set_client_states() the update differs; expected that of the run before"


def check_scores_are_those_of_clients_in_the_field(tested: EngineUnderTest) -> Iterator[str]:
    """Require scores on held-out examples, with personal layers, that change no client state."""
    task = make_task(("2.*",))
    model, clients = task.learner.initial(), FieldClients(task)
    tasks = [ClientTask(client, 1, 0, scores=True) for client in range(len(SIZES))]
    with tested.open(task) as engine:
        run_tasks(engine, 0, model, WORKS[0])
        for each in WORKS[0]:
            clients.train(model, each)
        engine.publish(1, model)
        before = engine.client_states()
        engine.begin(tasks)
        engine.drop(tasks[0])
        engine.retire(1)
        for each in tasks[1:]:
            if difference := _difference(engine.result(each), clients.score(model, each)):
                yield f"the scores of client {each.client}: {difference}"
                return
        if engine.client_states() != before:
            yield "scoring changes the states of clients; expected that they stay as they are"


def check_evaluation_uses_the_central_test_data(tested: EngineUnderTest) -> Iterator[str]:
    """Require the scores on the examples that no client has."""
    task = make_task()
    model = task.learner.initial()
    with tested.open(task) as engine:
        found = engine.evaluate(model)
    if difference := _difference_of_metrics(found, FieldClients(task).evaluate(model)):
        yield f"evaluate(): {difference}"


def check_models_of_another_shape_are_refused(tested: EngineUnderTest) -> Iterator[str]:
    """Require a `ModelError` for a model that does not fit the module."""
    with tested.open(make_task()) as engine:
        try:
            engine.publish(0, Parameters.from_arrays({"other": np.zeros(3, np.float32)}))
        except errors.ModelError:
            return
    yield "publish() of a model with other tensors is accepted; expected a ModelError"


def _difference(found: LocalUpdate, expected: LocalUpdate) -> str:
    """Describe how a result differs from that of a client in the field, or return ""."""
    if found.num_examples != expected.num_examples:
        return f"num_examples is {found.num_examples}; expected {expected.num_examples}"
    left, right = found.update.to_vector(), expected.update.to_vector()
    if left.shape != right.shape:
        return f"the update has {left.size} entries; expected {right.size}"
    if left.size and (difference := np.abs(left - right).max()) > ROUNDING:
        return f"the update differs by {difference:.1e} from that of a client in the field; expected {ROUNDING:.0e}"
    return _difference_of_metrics(found.metrics, expected.metrics)


def _difference_of_metrics(found: Mapping[str, float], expected: Mapping[str, float]) -> str:
    if found.keys() != expected.keys():
        return f"the metrics are {', '.join(sorted(found)) or 'none'}; expected {', '.join(sorted(expected))}"
    for name, value in expected.items():
        if not abs(found[name] - value) <= METRIC_ROUNDING * max(1.0, abs(value)):
            return f"{name} is {found[name]:.6g}; expected {value:.6g}, as of a client in the field"
    return ""


CHECKS = (
    check_clients_and_examples_are_those_of_the_data,
    check_training_equals_that_of_clients_in_the_field,
    check_the_order_of_results_changes_nothing,
    check_retired_versions_serve_their_tasks,
    check_dropped_tasks_leave_no_state,
    check_scores_are_those_of_clients_in_the_field,
    check_evaluation_uses_the_central_test_data,
    check_models_of_another_shape_are_refused,
)
