"""What trains clients and stays where it is: a module, the data, and the versions in the form that training wants."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch

from fedplat.client_state import ClientState
from fedplat.model import Bytes, Parameters, Schema
from fedplat.pytorch.training import Learner, LocalOptions, LocalTraining, Trainee, evaluate, train
from fedplat.pytorch.vectorized.examples import PartExamples
from fedplat.pytorch.vectorized.layout import Base, UnsuitableError
from fedplat.pytorch.vectorized.trainer import FlatTrainer
from fedplat.simulation.data.federation import Array, Federation
from fedplat.simulation.engines.interface import Work

Contents = Mapping[str, Parameters]
"""What a client remembers, as `ClientState` has it."""


NO_UPDATE = Parameters.from_arrays({})
"""Of a work that scores."""


class LocalResult(NamedTuple):
    """What a work gave; `contents` is None where the client remembers no more than before."""

    update: Parameters
    metrics: Mapping[str, float]
    contents: Contents | None


def num_examples(federation: Federation, work: Work) -> float:
    """How many examples a work is about."""
    return float((federation.num_held_out if work.scores else federation.num_examples)(work.client))


class ClientTraining(NamedTuple):
    """What is trained, on which data, and how."""

    federation: Federation
    learner: Learner
    options: LocalOptions
    seed: int = 0
    """For what a client has for itself at first: its personal layers."""


class ModuleTrainer:
    """Trains clients one after the other with one module, on the examples that it is given."""

    def __init__(self, learner: Learner, options: LocalOptions, seed: int = 0, device: str = "cpu") -> None:
        self._options = options
        self.trainee = Trainee(learner, device, seed=seed)
        if options.is_private:
            from fedplat.pytorch import dp  # here, and not in each process that is forked later

            dp.check(self.trainee.module)
        self._flat = _flat_trainer(self.trainee, options)
        self._bases: dict[int, Base] = {}
        self._schema: Schema | None = None

    def check(self, model: Parameters) -> None:
        """Raises `ModelError` when a model does not fit the module."""
        if model.schema is not self._schema:
            self.trainee.load(model, ClientState())
            self._schema = model.schema

    def publish(self, version: int, model: Parameters) -> None:
        """Keeps a version until it is retired. Raises `ModelError` when it does not fit the module."""
        self.check(model)
        if self._flat is None:
            self._bases[version] = Base(model, torch.empty(0), torch.empty(0), {})
        else:
            self._bases[version] = self._flat.base(model)

    def retire(self, version: int) -> None:
        """Forgets a version."""
        del self._bases[version]

    def answer_on(
        self, examples: PartExamples, work: Work, contents: Contents, buffer: Bytes | None = None
    ) -> LocalResult:
        """A work of a client that has these examples for it; its update lies in `buffer` if there is one."""
        base, memory = self._bases[work.version], ClientState(contents)
        if work.scores:
            return self.score_on(examples, base.parameters, memory)
        with one_thread():
            update, metrics = self._train(base, self.training_on(examples, work, memory), buffer)
        return LocalResult(update, metrics, memory.contents if memory.changed else None)

    def score_on(self, examples: PartExamples, model: Parameters, memory: ClientState) -> LocalResult:
        """A work that scores, of a client that has these examples for it."""
        return LocalResult(NO_UPDATE, self.evaluate_on(examples, model, memory), None)

    def evaluate_on(
        self, examples: PartExamples, model: Parameters, memory: ClientState | None = None
    ) -> dict[str, float]:
        """Scores a model, with what a client remembers; empty if there are no examples."""
        with one_thread():
            return evaluate(self.trainee, model, examples, memory=memory) if len(examples) else {}

    def training_on(self, examples: PartExamples, work: Work, memory: ClientState) -> LocalTraining:
        """What a work means for a client that has these examples."""
        return LocalTraining(
            examples=examples,
            options=self._options,
            seed=work.seed,
            round_number=work.version + 1,
            fraction=work.fraction,
            client_state=memory,
            noise_seed=work.seed,
        )

    def _train(self, base: Base, work: LocalTraining, buffer: Bytes | None) -> tuple[Parameters, Mapping[str, float]]:
        if self._flat is not None:
            try:
                return self._flat.train(base, work, buffer)
            except UnsuitableError:  # known only once it is tried
                self._flat = None
        parameters = base.parameters.copy()
        metrics = train(self.trainee, parameters, work)
        update = parameters.minus(base.parameters)
        if buffer is not None:
            buffer[:] = update.buffer
        return update, metrics


class InProcessTrainer(ModuleTrainer):
    """Trains clients of a task, whose data lies here."""

    def __init__(self, task: ClientTraining, device: str = "cpu") -> None:
        super().__init__(task.learner, task.options, task.seed, device)
        federation = task.federation
        self._parts, self._held_out = federation.parts, federation.held_out
        self._inputs, self._targets = tensor_of(federation.inputs, device), tensor_of(federation.targets, device)
        self._test = PartExamples(
            tensor_of(federation.test_inputs, device),
            tensor_of(federation.test_targets, device),
            np.arange(len(federation.test_targets)),
        )

    def answer(self, work: Work, contents: Contents, buffer: Bytes | None = None) -> LocalResult:
        """One client's work; its update lies in `buffer` if there is one."""
        return self.answer_on(self._examples(work), work, contents, buffer)

    def score(self, work: Work, contents: Contents, model: Parameters) -> LocalResult:
        """One client's work that scores, with the model of its version."""
        return self.score_on(self._examples(work), model, ClientState(contents))

    def evaluate(self, model: Parameters, start: int = 0, stop: int | None = None) -> dict[str, float]:
        """Scores a model on the held-out examples [start, stop); empty if there are none."""
        return self.evaluate_on(PartExamples(self._test.inputs, self._test.targets, self._test.part[start:stop]), model)

    def training(self, work: Work, memory: ClientState) -> LocalTraining:
        """What a work means for its client."""
        return self.training_on(self._examples(work), work, memory)

    def _examples(self, work: Work) -> PartExamples:
        part = (self._held_out if work.scores else self._parts)[work.client]
        return PartExamples(self._inputs, self._targets, part)


def tensor_of(array: Array, device: str = "cpu") -> torch.Tensor:
    """Data as modules and losses want it: float32 or int64 but for types that somebody chose on purpose."""
    if array.dtype == np.float64:
        array = array.astype(np.float32)
    elif array.dtype.kind in "iu":
        array = array.astype(np.int64, copy=False)
    elif not array.flags.writeable:
        array = array.copy()  # torch warns of what it must not write to, such as a mapped file
    return torch.from_numpy(array).to(device)


@contextmanager
def one_thread() -> Generator[None]:
    """Within it PyTorch computes on the calling thread: clients are the unit of parallel work, not their matrices."""
    before = torch.get_num_threads()
    if before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _flat_trainer(trainee: Trainee, options: LocalOptions) -> FlatTrainer | None:
    if trainee.device.type != "cpu":
        return None
    try:
        return FlatTrainer(trainee, options)
    except UnsuitableError:
        return None
