"""The Ray actor: it has a module and the versions that it has received, and fetches the data of its clients."""

from __future__ import annotations

import itertools
import os
import socket
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedplat.learner import ArrayLearner
from fedplat.model import Bytes, Parameters, Schema
from fedplat.simulation.data.federation import Array, Federation, Part
from fedplat.simulation.engines import interface, trainers, worker_pool
from fedplat.simulation.engines.interface import ClientTask
from fedplat.simulation.engines.tasks import SCORING, TaskFailure, describe_task

Piece = tuple[Array, Array]
"""Inputs and targets, as they are stored in Ray's object store."""
Model = tuple[Schema, Bytes]
"""A model as it is stored in Ray's object store; pickled `Parameters` would be many arrays."""


class Answer(NamedTuple):
    """The reply to a request. `note` is the new client state if it changed."""

    metrics: dict[str, float]
    update: Bytes | None = None
    note: bytes | None = None
    failure: TaskFailure | None = None
    num_examples: float | None = None


class RayWorker:
    """Answers requests one after the other, on one thread. Failures are answers too: not all exceptions can be pickled.

    `path` is the engine's `sys.path`.
    """

    def __init__(self, path: Sequence[str]) -> None:
        sys.path += [entry for entry in path if entry not in sys.path]  # where the user's modules are
        interface.keep_freed_memory()
        # Arrays in the object store are read-only. Batches are copies, so nothing writes to the arrays.
        warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)
        self._loaded: set[int] = set()

    def load(self, task: tuple[Any, Any, int, int]) -> str:
        """Create the trainer; returns a description of this process for error messages."""
        if torch := sys.modules.get("torch"):
            torch.set_num_threads(1)
        self._trainer: Any = make_trainer(*task)
        self._schema: Schema | None = None
        return f"process {os.getpid()} on {socket.gethostname()}"

    def answer(self, task: ClientTask, span: tuple[int, int], note: bytes | None, model: Model, piece: Piece) -> Answer:
        """Train or score a client on its examples, the range `span` of `piece`."""
        try:
            if task.version not in self._loaded:
                self._trainer.publish(task.version, self._parameters(model))
                self._loaded.add(task.version)
            contents = {} if note is None else worker_pool.unpack_state(note)
            outcome = self._trainer.answer_on(self._examples(piece, span), task, contents)
        except BaseException as exc:  # the process boundary: the engine raises it
            return Answer({}, failure=TaskFailure.of(describe_task(task), exc))
        after = None if outcome.contents is None else worker_pool.pack_state(outcome.contents)
        return Answer(dict(outcome.metrics), outcome.update.buffer, after, num_examples=outcome.num_examples)

    def score(self, model: Model, piece: Piece) -> Answer:
        """Score a model on all examples of a piece."""
        try:
            examples = self._examples(piece, (0, len(piece[1])))
            return Answer(self._trainer.evaluate_on(examples, self._parameters(model)))
        except BaseException as exc:  # as above
            return Answer({}, failure=TaskFailure.of(SCORING, exc))

    def retire(self, version: int) -> None:
        """Remove a version, if this actor has loaded it."""
        if version in self._loaded:
            self._loaded.remove(version)
            self._trainer.retire(version)

    def _examples(self, piece: Piece, span: tuple[int, int]) -> Any:
        return self._trainer.examples(*piece, np.arange(*span))

    def _parameters(self, model: Model) -> Parameters:
        schema, buffer = model
        if self._schema is None or self._schema != schema:
            self._schema = schema
        return Parameters(self._schema, buffer.copy())  # the store may free its own when the version is retired


def make_trainer(learner: Any, options: Any, seed: int, num_rounds: int) -> Any:
    """Return the trainer of a learner, which receives the examples with each task."""
    if isinstance(learner, ArrayLearner):
        return trainers.ArrayTrainer(learner, options, seed, num_rounds)
    from fedplat.simulation.engines.client_trainer import ModuleTrainer

    return ModuleTrainer(learner, options, seed)


def make_piece(inputs: Array, targets: Array, as_tensors: bool) -> Piece:
    """Convert examples to the types of tensors if the learner is a PyTorch module."""
    if not as_tensors:
        return inputs, targets
    from fedplat.simulation.engines.client_trainer import to_tensor

    return to_tensor(inputs).numpy(), to_tensor(targets).numpy()


_PIECE = 1 << 24
"""The approximate size of a piece in bytes: few objects, and little in each that a machine does not need."""


class DataShards:
    """Pieces with the `parts` of several clients each; `put` stores inputs and targets and returns their reference."""

    def __init__(self, federation: Federation, parts: Sequence[Part], put: Callable[[Piece], Any]) -> None:
        self._spans: list[tuple[Any, tuple[int, int]]] = []
        size = max(1, federation.inputs[0].nbytes + federation.targets[0].nbytes)
        waiting: list[Part] = []
        num_waiting = 0
        for part in parts:
            waiting.append(part)
            num_waiting += len(part)
            if num_waiting * size >= _PIECE:
                self._place(federation, waiting, put)
                waiting, num_waiting = [], 0
        if waiting:
            self._place(federation, waiting, put)

    def place(self, client: int) -> tuple[Any, tuple[int, int]]:
        """Return the reference of the piece with a client's examples, and their range (start, stop) in it."""
        return self._spans[client]

    def _place(self, federation: Federation, parts: list[Part], put: Callable[[Piece], Any]) -> None:
        indices = np.concatenate(parts)
        reference = put((federation.inputs[indices], federation.targets[indices]))
        ends = np.cumsum([0, *map(len, parts)]).tolist()
        self._spans += [(reference, (start, stop)) for start, stop in itertools.pairwise(ends)]
