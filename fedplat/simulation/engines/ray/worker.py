"""What lies in one of Ray's actors: a module, and the versions that it has met. Data comes with each work."""

from __future__ import annotations

import os
import socket
import sys
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from fedplat.model import Bytes, Parameters, Schema
from fedplat.pytorch.training import Learner, LocalOptions
from fedplat.pytorch.vectorized.examples import PartExamples
from fedplat.simulation.data.federation import Array
from fedplat.simulation.engines import malloc, messages
from fedplat.simulation.engines.client_trainer import ModuleTrainer, tensor_of
from fedplat.simulation.engines.interface import Work

Piece = tuple[Array, Array]
"""Inputs and targets, as they lie in Ray's object store."""
Model = tuple[Schema, Bytes]
"""A model as it lies in Ray's object store: pickled itself, it would be many arrays."""


class Answer(NamedTuple):
    """What came of a request. `note` is what the client remembers now, if that is new; `failure` says what failed."""

    metrics: dict[str, float]
    update: Bytes | None = None
    note: bytes | None = None
    failure: str = ""


class RayWorker:
    """Answers requests, one after the other and on one thread. What fails is an answer: not all errors can travel."""

    def __init__(self, path: Sequence[str]) -> None:
        sys.path += [entry for entry in path if entry not in sys.path]  # where the user's modules are
        torch.set_num_threads(1)
        malloc.keep()
        # What lies in the object store must not be written to, and is not: batches are copies.
        warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)
        self._known: set[int] = set()

    def load(self, task: tuple[Learner, LocalOptions, int]) -> str:
        """Makes the module; says where this is."""
        self._trainer = ModuleTrainer(*task)
        self._schema: Schema | None = None
        return f"process {os.getpid()} on {socket.gethostname()}"

    def answer(self, work: Work, span: tuple[int, int], note: bytes | None, model: Model, piece: Piece) -> Answer:
        """Does a client's work, whose examples for it are those of `span` in `piece`."""
        try:
            if work.version not in self._known:
                self._trainer.publish(work.version, self._parameters(model))
                self._known.add(work.version)
            contents = {} if note is None else messages.unpack_state(note)
            outcome = self._trainer.answer_on(_examples(piece, span), work, contents)
        except Exception as exc:  # the boundary of the process: the engine raises it
            return _make_failure(exc)
        after = None if outcome.contents is None else messages.pack_state(outcome.contents)
        return Answer(dict(outcome.metrics), outcome.update.buffer, after)

    def score(self, model: Model, piece: Piece) -> Answer:
        """Scores a model."""
        try:
            examples = _examples(piece, (0, len(piece[1])))
            return Answer(self._trainer.evaluate_on(examples, self._parameters(model)))
        except Exception as exc:  # as above
            return _make_failure(exc)

    def retire(self, version: int) -> None:
        """Forgets a version, if it was ever met."""
        if version in self._known:
            self._known.remove(version)
            self._trainer.retire(version)

    def _parameters(self, model: Model) -> Parameters:
        schema, buffer = model
        if self._schema is None or self._schema != schema:
            self._schema = schema
        return Parameters(self._schema, buffer.copy())  # the store may drop its own when the version is retired


def _examples(piece: Piece, span: tuple[int, int]) -> PartExamples:
    inputs, targets = (torch.from_numpy(array) for array in piece)
    return PartExamples(inputs, targets, np.arange(*span))


def piece_of(inputs: Array, targets: Array) -> Piece:
    """Examples in the types that training wants."""
    return tensor_of(inputs).numpy(), tensor_of(targets).numpy()


def _make_failure(exc: Exception) -> Answer:
    return Answer({}, failure=f"{type(exc).__name__}: {exc}"[: messages.MAX_FAILURE])
