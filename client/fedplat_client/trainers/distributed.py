"""The processes that torchrun started, as one client: rank 0 talks to the server, the others train with it.

For each training rank 0 announces the task in torchrun's store, and all ranks form a process group for its duration. A
rank that fails leaves the group, which fails the waiting ranks, so none is blocked, and the next training uses a new
group. Messages are msgpack; values are sent as tensors.
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
from fedplat.decoding import prepare_type
from fedplat.errors import FedplatError
from fedplat.model import Parameters
from fedplat.plugins import Plugins
from fedplat.pytorch import training
from fedplat.pytorch.distributed import COLLECTIVE_S, Backend, Ranks, join_group
from fedplat.pytorch.server import DataParallelGradients, make_on_all_ranks
from fedplat_client._work import process_group
from fedplat_client.errors import Cancelled, ClientError
from fedplat_client.task import Scalar, Task, TrainFunction
from fedplat_client.trainers.strategy import AfterStep, Made

_POLL_S = 0.05
_CONTINUE, _END, _CANCELLED = b"on", b"end", b"cancelled"
_logger = logging.getLogger(__name__)


class _Announcement(Struct, frozen=True):
    """The task of a training that starts."""

    name: str
    config: dict[str, Scalar]
    job_id: str
    job_name: str
    round: int
    attempt: int
    backend: Backend
    timeout_s: float


class _Sizes(Struct, frozen=True):
    """Sizes in bytes of the tensors that follow: the model, and the notes of the client state."""

    model: int
    notes: dict[str, int]


class TorchrunGroup:
    """This process's membership in torchrun's group: a `fedplat_client._work.process_group.ProcessGroup`."""

    def __init__(self) -> None:
        self.leads = os.environ["RANK"] == "0"
        self._store: Any = None
        self._number = 0
        self._ranks: Ranks | None = None

    @contextlib.contextmanager
    def train_together(self, task: Task, backend: Backend) -> Generator[MultiProcess]:
        """Join the ranks of one training and send them the task's model and client state; leave them at its end."""
        if not self.leads:
            assert self._ranks is not None
            yield MultiProcess(self._ranks)
            return
        timeout_s = min(COLLECTIVE_S, max(1.0, task.remaining_s))
        announcement = _Announcement(
            name=task.name,
            config=dict(task.config),
            job_id=task.job_id,
            job_name=task.job_name,
            round=task.round,
            attempt=task.attempt,
            backend=backend,
            timeout_s=timeout_s,
        )
        self._publish(msgspec.msgpack.encode(announcement))
        with join_group(backend, timeout_s, self._group_store()) as ranks, self._name_failed_rank():
            notes = task.client_state.contents
            sizes = {name: values.schema.file_size_bytes for name, values in notes.items()}
            ranks.broadcast(msgspec.msgpack.encode(_Sizes(task.parameters.schema.file_size_bytes, sizes)))
            for values in (task.parameters, *notes.values()):
                _send(values)
            yield MultiProcess(ranks)

    def follow(self, trainers: Mapping[str, TrainFunction], plugins: Plugins) -> None:
        """Join the trainings that rank 0 announces, until it ends. Raises `ClientError` if rank 0 is gone."""
        while (message := self._receive_from_leader()) != _END:
            announcement = msgspec.msgpack.decode(message, type=prepare_type(_Announcement))
            fields = {"job": announcement.job_id, "round": announcement.round, "job_name": announcement.job_name}
            _logger.info("A training with rank 0 started.", extra=fields)
            try:
                self._join(announcement, trainers, plugins)
            except Cancelled:
                _logger.info("Rank 0 stopped the training.", extra=fields)
            except FedplatError as exc:
                _logger.warning("The training with rank 0 failed: %s", exc, extra=fields)
            except Exception:  # the task's boundary: the trainer is code of the client's owner
                _logger.exception("The training with rank 0 failed.", extra=fields)

    def release(self) -> None:
        """Let the following processes end."""
        with contextlib.suppress(RuntimeError):  # torchrun is gone, and has ended them
            self._publish(_END)

    def _join(self, announcement: _Announcement, trainers: Mapping[str, TrainFunction], plugins: Plugins) -> None:
        with join_group(announcement.backend, announcement.timeout_s, self._group_store()) as self._ranks:
            try:
                trainers[announcement.name](_receive_task(announcement, self._ranks, plugins))
            except Exception as exc:
                # Publish the error before leaving the group, since leaving fails the other ranks.
                message = f"rank {self._ranks.rank}: {type(exc).__name__}: {exc}"
                self._open_store().compare_set(self._failure_key, "", message)
                raise

    @contextlib.contextmanager
    def _name_failed_rank(self) -> Generator[None]:
        """Raise an error that names the rank that failed first; rank 0 itself only sees the broken group."""
        try:
            yield
        except RuntimeError as exc:
            store = self._open_store()
            if store.check([self._failure_key]):
                raise ClientError(f"the training failed on {store.get(self._failure_key).decode()}") from exc
            raise

    @property
    def _failure_key(self) -> str:
        return f"failed/{self._number}"

    def _publish(self, content: bytes) -> None:
        self._number += 1
        self._open_store().set(f"said/{self._number}", content)

    def _receive_from_leader(self) -> bytes:
        """Wait for the next message of rank 0, without a time limit."""
        self._number += 1
        key, pause = f"said/{self._number}", threading.Event()
        try:
            # Poll, because nothing interrupts a wait of the store, not even a signal.
            while not self._open_store().check([key]):
                pause.wait(_POLL_S)
            return self._open_store().get(key)
        except RuntimeError as exc:
            raise ClientError(f"rank 0 or torchrun has ended, so this process ends too: {exc}") from exc

    def _group_store(self) -> Any:
        """Return the store of the process group for the training announced last."""
        return PrefixStore(f"group/{self._number}", self._open_store())

    def _open_store(self) -> Any:
        if self._store is None:
            store, _, _ = next(rendezvous("env://"))
            self._store = PrefixStore("fedplat", store)
        return self._store


def find_group() -> TorchrunGroup | None:
    """Return torchrun's group of this process and others, created at the first call; None for a single process."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2 or "RANK" not in os.environ:
        return None
    group = process_group.current()
    if not isinstance(group, TorchrunGroup):
        group = TorchrunGroup()
        process_group.form(group)
    return group


class MultiProcess:
    """Training by all ranks together: a `TrainingStrategy`."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.device = ranks.device

    def make_on_all(self, make: Callable[[], Made]) -> Made:
        """Return the result of `make` if it succeeds in all processes; otherwise all of them raise `TrainingError`."""
        return make_on_all_ranks(self._ranks, make)

    def check(self, trainee: training.Trainee, num_examples: int) -> None:
        """Raise `ValueError` if there are too few examples for the processes."""
        self._gradients(0).check(trainee, num_examples)

    def make_gradients(self, seed: int) -> training.GradientComputation:
        """Return a gradient computation with one logical rank per process: each batch is split among them."""
        return self._gradients(seed)

    def after_step(self, after_step: AfterStep) -> AfterStep:
        """Return a callback that makes all ranks continue, end, or raise `Cancelled`, as rank 0 does."""

        def step(done: int, total: int) -> bool:
            if not self._ranks.is_first:
                decision = self._ranks.broadcast()
                if decision == _CANCELLED:
                    raise Cancelled("CLIENT_STOPPED", "rank 0 was stopped")
                return decision == _CONTINUE
            decision = _CANCELLED
            try:
                continues = after_step(done, total)
                decision = _CONTINUE if continues else _END
                return continues
            finally:
                self._ranks.broadcast(decision)

        return step

    def _gradients(self, seed: int) -> DataParallelGradients:
        return DataParallelGradients(self._ranks, self._ranks.size, seed)


def _receive_task(announcement: _Announcement, ranks: Ranks, plugins: Plugins) -> Task:
    """Receive the task of rank 0 on another rank."""
    sizes = msgspec.msgpack.decode(ranks.broadcast(), type=prepare_type(_Sizes))
    return Task(
        name=announcement.name,
        parameters=_receive_parameters(sizes.model),
        config=announcement.config,
        job_id=announcement.job_id,
        job_name=announcement.job_name,
        round=announcement.round,
        attempt=announcement.attempt,
        plugins=plugins,
        client_state=ClientState({name: _receive_parameters(size) for name, size in sizes.notes.items()}),
    )


def _send(values: Parameters) -> None:
    distributed.broadcast(torch.frombuffer(bytearray(values.to_bytes()), dtype=torch.uint8), group_src=0)


def _receive_parameters(size_bytes: int) -> Parameters:
    content = torch.empty(size_bytes, dtype=torch.uint8)
    distributed.broadcast(content, group_src=0)
    return Parameters.from_bytes(content.numpy())
