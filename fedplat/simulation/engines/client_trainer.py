"""Trainers of PyTorch modules in one process, and the engine that trains many clients in each operation."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from typing_extensions import override

from fedplat import client_state, errors
from fedplat.client_state import ClientState
from fedplat.model import Bytes, Parameters, Schema
from fedplat.pytorch.training import (
    Learner,
    LocalOptions,
    LocalTraining,
    Trainee,
    check_base,
    choose_device,
    evaluate,
    train,
)
from fedplat.pytorch.vectorized import batched, layout, trainer
from fedplat.pytorch.vectorized.batched import PartExamples
from fedplat.simulation.data.federation import Array, Part
from fedplat.simulation.engines.interface import ClientTask, LocalUpdate
from fedplat.simulation.engines.tasks import (
    NO_UPDATE,
    ClientTraining,
    Contents,
    InProcessEngine,
    LocalResult,
    Versions,
    num_examples,
)


class ModuleTrainer:
    """Trains clients one after the other with one module, on the examples that the caller passes."""

    def __init__(self, learner: Learner, options: LocalOptions, seed: int = 0, device: str = "cpu") -> None:
        self.splits_test = not learner.metrics
        self._options = options
        self.trainee = Trainee(learner, device, seed=seed)
        check_base(self.trainee.base, options.base_sha256)
        if options.is_private:
            from fedplat.pytorch import dp  # import it here, before workers are forked, and not once in each of them

            dp.check(self.trainee.module)
        self._flat = _flat_trainer(self.trainee, options)
        self._bases: dict[int, layout.Base] = {}
        self._schema: Schema | None = None

    def check(self, model: Parameters) -> None:
        """Raise `ModelError` if a model does not fit the module."""
        if model.schema is not self._schema:
            self.trainee.load(model, ClientState())
            self._schema = model.schema

    def publish(self, version: int, model: Parameters) -> None:
        """Store a version until it is retired. Raises `ModelError` if it does not fit the module."""
        self.check(model)
        if self._flat is None:
            self._bases[version] = layout.Base(model, torch.empty(0), torch.empty(0), {})
        else:
            self._bases[version] = self._flat.base(model)

    def retire(self, version: int) -> None:
        """Remove a version."""
        del self._bases[version]

    def answer_on(
        self, examples: PartExamples, task: ClientTask, contents: Contents, buffer: Bytes | None = None
    ) -> LocalResult:
        """Train or score on a client's examples; the update is written to `buffer` if there is one.

        `contents` is the client state at the start.
        """
        base, state = self._bases[task.version], ClientState(contents)
        if task.scores:
            return self.score_on(examples, base.parameters, state)
        with one_thread():
            update, metrics = self._train(base, self.training_on(examples, task, state), buffer)
        return LocalResult(update, metrics, state.contents if state.changed else None)

    def score_on(self, examples: PartExamples, model: Parameters, state: ClientState) -> LocalResult:
        """Score a model on a client's examples, and return the result of the task."""
        return LocalResult(NO_UPDATE, self.evaluate_on(examples, model, state), None)

    def evaluate_on(
        self, examples: PartExamples, model: Parameters, state: ClientState | None = None
    ) -> dict[str, float]:
        """Score a model with a client state; returns no metrics if there are no examples."""
        with one_thread():
            return evaluate(self.trainee, model, examples, client_state=state) if len(examples) else {}

    def examples(self, inputs: Array, targets: Array, part: Part) -> PartExamples:
        """Return the examples at the indices `part` of arrays that have the types of tensors."""
        return PartExamples(torch.from_numpy(inputs), torch.from_numpy(targets), part)

    def training_on(self, examples: PartExamples, task: ClientTask, state: ClientState) -> LocalTraining:
        """Return the local training of a task on a client's examples."""
        return LocalTraining(
            examples=examples,
            options=self._options,
            seed=task.seed,
            round_number=task.training_round,
            fraction=task.fraction,
            client_state=state,
            noise_seed=task.seed,
        )

    def _train(
        self, base: layout.Base, training: LocalTraining, buffer: Bytes | None
    ) -> tuple[Parameters, Mapping[str, float]]:
        if self._flat is not None:
            try:
                return self._flat.train(base, training, buffer)
            except layout.UnsuitableError:  # only the first training shows it
                self._flat = None
        parameters = base.parameters.copy()
        metrics = train(self.trainee, parameters, training)
        update = parameters.minus(base.parameters)
        if buffer is not None:
            buffer[:] = update.buffer
        return update, metrics


class InProcessTrainer(ModuleTrainer):
    """Trains clients on data in the memory of this process."""

    def __init__(self, task: ClientTraining, device: str = "cpu") -> None:
        super().__init__(task.learner, task.options, task.seed, device)
        federation = task.federation
        self._parts, self._held_out = federation.parts, federation.held_out
        self._inputs, self._targets = to_tensor(federation.inputs, device), to_tensor(federation.targets, device)
        self._test = PartExamples(
            to_tensor(federation.test_inputs, device),
            to_tensor(federation.test_targets, device),
            np.arange(len(federation.test_targets)),
        )

    def answer(self, task: ClientTask, contents: Contents, buffer: Bytes | None = None) -> LocalResult:
        """Train or score a client; the update is written to `buffer` if there is one."""
        return self.answer_on(self._examples(task), task, contents, buffer)

    def score(self, task: ClientTask, contents: Contents, model: Parameters) -> LocalResult:
        """Score `model`, which is the task's version, on the held-out examples of the task's client."""
        return self.score_on(self._examples(task), model, ClientState(contents))

    def evaluate(self, model: Parameters, start: int = 0, stop: int | None = None) -> dict[str, float]:
        """Score a model on the central test examples [start, stop); returns no metrics without examples."""
        return self.evaluate_on(PartExamples(self._test.inputs, self._test.targets, self._test.part[start:stop]), model)

    def training(self, task: ClientTask, state: ClientState) -> LocalTraining:
        """Return the local training of a task on its client's examples."""
        return self.training_on(self._examples(task), task, state)

    def _examples(self, task: ClientTask) -> PartExamples:
        part = (self._held_out if task.scores else self._parts)[task.client]
        return PartExamples(self._inputs, self._targets, part)


def to_tensor(array: Array, device: str = "cpu") -> torch.Tensor:
    """Convert an array to a tensor: float64 to float32 and integers to int64, as modules and losses require.

    Other types are kept: the user chose them on purpose.
    """
    if array.dtype == np.float64:
        array = array.astype(np.float32)
    elif array.dtype.kind in "iu":
        array = array.astype(np.int64, copy=False)
    elif not array.flags.writeable:
        array = array.copy()  # torch warns about arrays that it must not write to, such as a mapped file
    return torch.from_numpy(array).to(device)


@contextmanager
def one_thread() -> Generator[None]:
    """Compute on the calling thread inside the block: engines run clients in parallel, not single operations."""
    before = torch.get_num_threads()
    if before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _flat_trainer(trainee: Trainee, options: LocalOptions) -> trainer.FlatTrainer | None:
    if trainee.device.type != "cpu":
        return None
    try:
        return trainer.FlatTrainer(trainee, options)
    except layout.UnsuitableError:
        return None


class VmapEngine(InProcessEngine):
    """Trains all waiting tasks of one version together, when the first of their results is fetched.

    `device` is a PyTorch device; by default a GPU if there is one. Raises `EngineError` for a model or training options
    that cannot be vectorized.
    """

    def __init__(self, task: ClientTraining, device: str | None = None) -> None:
        super().__init__()
        self._federation = task.federation
        self._trainer = InProcessTrainer(task, str(choose_device(device or "auto")))
        try:
            self._cohort_trainer = batched.CohortTrainer(self._trainer.trainee, task.options)
        except layout.UnsuitableError as exc:
            raise _unsuitable(exc) from exc
        self._bases: dict[int, layout.Base] = {}
        self._versions = Versions(self._bases.pop)
        self._waiting: dict[int, dict[ClientTask, None]] = defaultdict(dict)
        self._done: dict[ClientTask, LocalResult] = {}

    @property
    def at_once(self) -> int:
        """The largest number of clients that are trained at the same time."""
        return self._cohort_trainer.at_once()

    @override
    def publish(self, version: int, model: Parameters) -> None:
        self._trainer.check(model)
        self._bases[version] = self._cohort_trainer.base(model)

    @override
    def begin(self, tasks: Sequence[ClientTask]) -> None:
        for task in tasks:
            self._versions.begin(task)
            self._waiting[task.version][task] = None

    @override
    def result(self, task: ClientTask) -> LocalUpdate:
        """Train the client together with other waiting ones, or score it alone."""
        if task.scores:
            del self._waiting[task.version][task]
            contents = self._states.begin(task) or {}
            self._done[task] = self._trainer.score(task, contents, self._bases[task.version].parameters)
        elif task not in self._done:
            self._train(task)
        outcome = self._done.pop(task)
        self._versions.end(task)
        if outcome.contents is not None:
            self._states.put(task, outcome.contents)
        return LocalUpdate(outcome.update, num_examples(self._federation, task), outcome.metrics)

    @override
    def drop(self, task: ClientTask) -> None:
        if task in self._waiting[task.version] or task in self._done:
            self._waiting[task.version].pop(task, None)
            self._done.pop(task, None)
            self._versions.end(task)
        else:
            self._states.undo(task)

    @override
    def evaluate(self, model: Parameters) -> Mapping[str, float]:
        return self._trainer.evaluate(model)

    def _train(self, task: ClientTask) -> None:
        """Train a task together with tasks of about its size, so that all end at about the same step."""
        waiting = self._waiting[task.version]
        tasks = sorted(
            (each for each in waiting if not each.scores),
            key=lambda each: (-each.fraction * self.num_examples(each.client), each.client),
        )
        groups = np.array_split(np.arange(len(tasks)), math.ceil(len(tasks) / self.at_once))
        tasks = next(members for group in groups if task in (members := [tasks[index] for index in group]))
        states = [client_state.ClientState(self._states.begin(each)) for each in tasks]
        trainings = [self._trainer.training(each, state) for each, state in zip(tasks, states, strict=True)]
        try:
            with one_thread():
                results = self._cohort_trainer.train(self._bases[task.version], trainings)
        except layout.UnsuitableError as exc:
            raise _unsuitable(exc) from exc
        for each, state, (update, metrics) in zip(tasks, states, results, strict=True):
            del waiting[each]
            self._done[each] = LocalResult(update, metrics, state.contents if state.changed else None)


def _unsuitable(exc: layout.UnsuitableError) -> errors.UnsuitableEngineError:
    return errors.UnsuitableEngineError(f'engine = "vmap": {exc}; use "loop" or "processes"')
