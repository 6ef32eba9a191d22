"""The processes that torchrun started, as one client: rank 0 talks to the server, the others train with it.

For each training rank 0 announces the task in torchrun's store, and all form a process group that lasts as long as the
training. A rank that fails leaves the group, which ends the others' waiting with an error; so nobody is left behind,
and the next training begins with a new group. What is announced and told is msgpack; values are sent as tensors.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Generator, Mapping
from typing import Any

import msgspec
import torch
from msgspec import Struct
from torch import distributed
from torch.distributed import PrefixStore, rendezvous  # pyright: ignore[reportPrivateImportUsage]

from fedplat.client_state import ClientState
from fedplat.errors import FedplatError
from fedplat.model import Parameters
from fedplat.pytorch import training
from fedplat.pytorch.distributed import COLLECTIVE_S, Backend, Ranks, join_group
from fedplat.pytorch.server import DataParallelGradients, make_on_all_ranks
from fedplat_client._work import process_group
from fedplat_client.errors import Cancelled, ClientError
from fedplat_client.task import Scalar, Task, TrainFunction
from fedplat_client.trainers.strategy import AfterStep, Made

_POLL_S = 0.05
_ON, _END, _CANCELLED = b"on", b"end", b"cancelled"
_logger = logging.getLogger(__name__)


class _Announced(Struct, frozen=True):
    """A training that begins."""

    name: str
    config: dict[str, Scalar]
    job_id: str
    job_name: str
    round: int
    attempt: int
    backend: Backend
    timeout_s: float


class _Sizes(Struct, frozen=True):
    """In bytes, of what follows: the model, and the notes of the client's memory."""

    model: int
    notes: dict[str, int]


class TorchrunGroup:
    """This process's place among those of torchrun: `crews.Crew`."""

    def __init__(self) -> None:
        self.leads = os.environ["RANK"] == "0"
        self._store: Any = None
        self._number = 0
        self._ranks: Ranks | None = None

    @contextlib.contextmanager
    def together(self, task: Task, backend: Backend) -> Generator[MultiProcess]:
        """The ranks for one training; they have the task's model and memory. Ends with it, well or badly."""
        if not self.leads:
            assert self._ranks is not None
            yield MultiProcess(self._ranks)
            return
        timeout_s = min(COLLECTIVE_S, max(1.0, task.remaining_s))
        announced = _Announced(
            name=task.name,
            config=dict(task.config),
            job_id=task.job_id,
            job_name=task.job_name,
            round=task.round,
            attempt=task.attempt,
            backend=backend,
            timeout_s=timeout_s,
        )
        self._say(msgspec.msgpack.encode(announced))
        with join_group(backend, timeout_s, self._room()) as ranks, self._name_failed_rank():
            notes = task.client_state.contents
            sizes = {name: values.schema.file_size_bytes for name, values in notes.items()}
            ranks.broadcast(msgspec.msgpack.encode(_Sizes(task.parameters.schema.file_size_bytes, sizes)))
            for values in (task.parameters, *notes.values()):
                _send(values)
            yield MultiProcess(ranks)

    def follow(self, trainers: Mapping[str, TrainFunction]) -> None:
        """Joins the trainings that rank 0 announces, until it ends. Raises `ClientError` if it is gone."""
        while (said := self._receive_from_leader()) != _END:
            announced = msgspec.msgpack.decode(said, type=_Announced)
            fields = {"job": announced.job_name or announced.job_id, "round": announced.round}
            _logger.info("A training with rank 0 begins.", extra=fields)
            try:
                self._join(announced, trainers)
            except Cancelled:
                _logger.info("Rank 0 stopped the training.", extra=fields)
            except FedplatError as exc:
                _logger.warning("The training with rank 0 failed: %s", exc, extra=fields)
            except Exception:  # the task's boundary: the trainer is code of the client's owner
                _logger.exception("The training with rank 0 failed.", extra=fields)

    def release(self) -> None:
        """Lets the processes that follow end."""
        with contextlib.suppress(RuntimeError):  # torchrun is gone, and has ended them
            self._say(_END)

    def _join(self, announced: _Announced, trainers: Mapping[str, TrainFunction]) -> None:
        with join_group(announced.backend, announced.timeout_s, self._room()) as self._ranks:
            try:
                trainers[announced.name](_task(announced, self._ranks))
            except Exception as exc:
                # Before the group is left, since that fails the others.
                said = f"rank {self._ranks.rank}: {type(exc).__name__}: {exc}"
                self._open_group().compare_set(self._failed, "", said)
                raise

    @contextlib.contextmanager
    def _name_failed_rank(self) -> Generator[None]:
        """Says which rank has failed first, where rank 0 only sees that the group is broken."""
        try:
            yield
        except RuntimeError as exc:
            if self._open_group().check([self._failed]):
                raise ClientError(f"the training failed on {self._open_group().get(self._failed).decode()}") from exc
            raise

    @property
    def _failed(self) -> str:
        return f"failed/{self._number}"

    def _say(self, content: bytes) -> None:
        self._number += 1
        self._open_group().set(f"said/{self._number}", content)

    def _receive_from_leader(self) -> bytes:
        """What rank 0 says next, however long that takes."""
        self._number += 1
        key, pause = f"said/{self._number}", threading.Event()
        try:
            # Polls, because nothing interrupts a wait of the store, no signal either.
            while not self._open_group().check([key]):
                pause.wait(_POLL_S)
            return self._open_group().get(key)
        except RuntimeError as exc:
            raise ClientError(f"rank 0 or torchrun is gone, and this process with it: {exc}") from exc

    def _room(self) -> Any:
        """Where the ranks meet for the training that was announced last."""
        return PrefixStore(f"group/{self._number}", self._open_group())

    def _open_group(self) -> Any:
        if self._store is None:
            store, _, _ = next(rendezvous("env://"))
            self._store = PrefixStore("fedplat", store)
        return self._store


def of_this_process() -> TorchrunGroup | None:
    """The crew that torchrun made of this process and others; None if it is alone."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2 or "RANK" not in os.environ:
        return None
    crew = process_group.current()
    if not isinstance(crew, TorchrunGroup):
        crew = TorchrunGroup()
        process_group.form(crew)
    return crew


class MultiProcess:
    """The ranks that train together: `company.Company`."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.device = ranks.device

    def make_on_all(self, make: Callable[[], Made]) -> Made:
        """What `make` gives, if it gives something in all processes; else all of them raise `TrainingError`."""
        return make_on_all_ranks(self._ranks, make)

    def check(self, trainee: training.Trainee, num_examples: int) -> None:
        """Raises `ValueError` where so few examples are not enough for all."""
        self._spread(0).check(trainee, num_examples)

    def passes(self, seed: int) -> training.GradientComputation:
        """Those of as many logical ranks as there are processes: each batch is cut into their parts."""
        return self._spread(seed)

    def after_step(self, after_step: AfterStep) -> AfterStep:
        """All go on, end, or raise `Cancelled`, as rank 0 does."""

        def step(done: int, total: int) -> bool:
            if not self._ranks.is_first:
                said = self._ranks.broadcast()
                if said == _CANCELLED:
                    raise Cancelled("CLIENT_STOPPED", "rank 0 was told to stop")
                return said == _ON
            said = _CANCELLED
            try:
                goes_on = after_step(done, total)
                said = _ON if goes_on else _END
                return goes_on
            finally:
                self._ranks.broadcast(said)

        return step

    def _spread(self, seed: int) -> DataParallelGradients:
        return DataParallelGradients(self._ranks, self._ranks.size, seed)


def _task(announced: _Announced, ranks: Ranks) -> Task:
    """The task of rank 0, as the others see it."""
    sizes = msgspec.msgpack.decode(ranks.broadcast(), type=_Sizes)
    return Task(
        name=announced.name,
        parameters=_receive_parameters(sizes.model),
        config=announced.config,
        job_id=announced.job_id,
        job_name=announced.job_name,
        round=announced.round,
        attempt=announced.attempt,
        client_state=ClientState({name: _receive_parameters(size) for name, size in sizes.notes.items()}),
    )


def _send(values: Parameters) -> None:
    distributed.broadcast(torch.frombuffer(bytearray(values.to_bytes()), dtype=torch.uint8), group_src=0)


def _receive_parameters(size_bytes: int) -> Parameters:
    content = torch.empty(size_bytes, dtype=torch.uint8)
    distributed.broadcast(content, group_src=0)
    return Parameters.from_bytes(content.numpy())
