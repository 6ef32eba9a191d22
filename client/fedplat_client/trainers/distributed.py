"""The processes that a launcher started, as one client: rank 0 talks to the server, the others compute with it.

For each training rank 0 announces the task in the launcher's store, and all ranks form a process group for its
duration. A rank that fails leaves the group, which fails the waiting ranks, so none is blocked, and the next training
uses a new group. Messages are msgpack; values are sent as tensors, or as a file for each host (`layout.py`).
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

from fedplat import client_state, errors, forks, texts
from fedplat.config import decoding, user_code
from fedplat.config.plugins import Plugins
from fedplat.model import Parameters
from fedplat.pytorch import server, training
from fedplat.pytorch.distributed import (
    COLLECTIVE_S,
    Backend,
    LaunchedRank,
    Ranks,
    check_mpi,
    find_rank,
    join_group,
    open_store,
)
from fedplat_client._work import process_group
from fedplat_client.errors import Cancelled, ClientError
from fedplat_client.task import EvaluateFunction, EvaluateResult, Scalar, Task, TrainFunction, TrainResult
from fedplat_client.trainers.model_file import share_model
from fedplat_client.trainers.strategy import AfterStep, Made, TrainingStrategy

_POLL_S = 0.05
_MEET_S = 300.0
"""The timeout for all ranks to have started, where rank 0 has opened the store."""
_CONTINUE, _END, _CANCELLED = b"on", b"end", b"cancelled"
_NAMES = ("name", "job_id", "job_name", "round", "attempt")
"""What an announcement has of its task, by the same names."""
_logger = logging.getLogger(__name__)


class _Announcement(Struct, frozen=True):
    """The task of a training or an evaluation that starts."""

    name: str
    evaluates: bool
    shares_file: bool
    """True if the model is a file for each host instead of a message."""
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


class LaunchedGroup:
    """This process's membership in the launcher's group: a `fedplat_client._work.process_group.ProcessGroup`."""

    def __init__(self, place: LaunchedRank) -> None:
        self.leads = place.rank == 0
        self.size = place.size
        self._place = place
        self._store: Any = None
        self._number = 0
        self._ranks: Ranks | None = None

    @contextlib.contextmanager
    def train_together(self, task: Task, backend: Backend) -> Generator[MultiProcess]:
        """Join the ranks of one training and send them the task's model and client state; leave them at its end."""
        with self._join_ranks(task, backend) as ranks:
            if self.leads:
                notes = task.client_state.contents
                sizes = {name: values.schema.file_size_bytes for name, values in notes.items()}
                ranks.broadcast(msgspec.msgpack.encode(_Sizes(task.parameters.schema.file_size_bytes, sizes)))
                for values in (task.parameters, *notes.values()):
                    _send(values)
            yield MultiProcess(ranks, task)

    @contextlib.contextmanager
    def compute_in_layout(
        self, task: Task, backend: Backend, *, evaluates: bool = False
    ) -> Generator[tuple[Ranks, Parameters]]:
        """Join the ranks of one training or evaluation; yield them, with the model mapped from a file of this host.

        On rank 0 the parameters may be changed; that changes the file.
        """
        with self._join_ranks(task, backend, evaluates=evaluates, shares_file=True) as ranks:
            if not self.leads:
                yield ranks, task.parameters
                return
            with share_model(ranks, task.parameters) as parameters:
                yield ranks, parameters

    @contextlib.contextmanager
    def _join_ranks(
        self, task: Task, backend: Backend, *, evaluates: bool = False, shares_file: bool = False
    ) -> Generator[Ranks]:
        if not self.leads:
            assert self._ranks is not None
            yield self._ranks
            return
        # A training that may be late continues after its deadline.
        timeout_s = COLLECTIVE_S if task.control.may_be_late else min(COLLECTIVE_S, max(1.0, task.remaining_s))
        announcement = _Announcement(
            evaluates=evaluates,
            shares_file=shares_file,
            config=dict(task.config),
            backend=backend,
            timeout_s=timeout_s,
            **{name: getattr(task, name) for name in _NAMES},
        )
        self._publish(msgspec.msgpack.encode(announcement))
        with join_group(backend, timeout_s, self._group_store()) as ranks, self._name_failed_rank():
            yield ranks

    def follow(
        self, trainers: Mapping[str, TrainFunction], evaluators: Mapping[str, EvaluateFunction], plugins: Plugins
    ) -> None:
        """Join what rank 0 announces, until it ends. Raises `ClientError` if rank 0 is gone."""
        while (message := self._receive_from_leader()) != _END:
            announcement = msgspec.msgpack.decode(message, type=decoding.prepare_type(_Announcement))
            fields = {"job": announcement.job_id, "round": announcement.round, "job_name": announcement.job_name}
            what = "evaluation" if announcement.evaluates else "training"
            functions = evaluators if announcement.evaluates else trainers
            _logger.info(
                "%s with rank 0 started.", "An evaluation" if announcement.evaluates else "A training", extra=fields
            )
            try:
                self._join(announcement, functions[announcement.name], plugins)
            except Cancelled:
                _logger.info("Rank 0 stopped the %s.", what, extra=fields)
            except errors.FedplatError as exc:
                _logger.warning("The %s with rank 0 failed: %s", what, exc, extra=fields)
            except BaseException as exc:  # the task's boundary: the trainer is code of the client's owner
                if user_code.is_interrupt(exc):
                    raise
                _logger.exception("The %s with rank 0 failed.", what, extra=fields)

    def release(self) -> None:
        """Let the following processes end."""
        with contextlib.suppress(RuntimeError):  # the launcher is gone, and has ended them
            self._publish(_END)

    def _join(
        self, announcement: _Announcement, function: Callable[[Task], TrainResult | EvaluateResult], plugins: Plugins
    ) -> None:
        owner = os.getpid()
        with join_group(announcement.backend, announcement.timeout_s, self._group_store()) as self._ranks:
            try:
                with _receive_task(announcement, self._ranks, plugins) as task:
                    function(task)
                forks.end_child(owner)
            except BaseException as exc:
                forks.end_child(owner, exc)
                # Publish the error before leaving the group, since leaving fails the other ranks.
                message = f"rank {self._ranks.rank}: {texts.describe(exc)}"
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
            raise ClientError(f"rank 0 or its launcher has ended, so this process ends too: {exc}") from exc

    def _group_store(self) -> Any:
        """Return the store of the process group for the training announced last."""
        return PrefixStore(f"group/{self._number}", self._open_store())

    def _open_store(self) -> Any:
        if self._store is None:
            if self._place.launcher == "torchrun":
                store, _, _ = next(rendezvous("env://"))
            else:
                store = open_store(self._place, _MEET_S)
            # torchrun's store outlives the ranks: those that it starts again must not read what the former ones wrote.
            self._store = PrefixStore(f"fedplat/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        return self._store


def find_group(backend: Backend = "auto") -> LaunchedGroup | None:
    """Return the launcher's group of this process and others, created at the first call; None for a single process.

    Raises `ValueError` for a backend that this PyTorch does not have.
    """
    place = find_rank()
    if place is None or place.size < 2:
        return None
    check_mpi(backend)
    group = process_group.current()
    if not isinstance(group, LaunchedGroup):
        group = LaunchedGroup(place)
        process_group.form(group)
    return group


class MultiProcess(TrainingStrategy):
    """Data-parallel training by all ranks together."""

    def __init__(self, ranks: Ranks, task: Task) -> None:
        self._ranks = ranks
        self.device = ranks.device
        self.parameters = task.parameters

    def make_on_all(self, make: Callable[[], Made]) -> Made:
        """Return the result of `make` if it succeeds in all processes; otherwise all of them raise `TrainingError`."""
        return server.make_on_all_ranks(self._ranks, make)

    def check(self, trainee: training.Trainee, num_examples: int) -> None:
        """Raise `ValueError` if there are too few examples for the processes."""
        self._gradients(0).check(trainee, num_examples)

    def make_gradients(self, seed: int) -> training.GradientComputation:
        """Return a gradient computation with one logical rank per process: each batch is split among them."""
        return self._gradients(seed)

    def after_step(self, after_step: AfterStep) -> AfterStep:
        """Return a callback that makes all ranks continue, end, or raise `Cancelled`, as rank 0 does."""
        return follow_first(self._ranks, after_step)

    def _gradients(self, seed: int) -> server.DataParallelGradients:
        return server.DataParallelGradients(self._ranks, self._ranks.size, seed)


def follow_first(ranks: Ranks, after_step: AfterStep) -> AfterStep:
    """Return a callback that makes all ranks continue, end, or raise `Cancelled`, as rank 0 does."""

    def step(done: int, total: int) -> bool:
        if not ranks.is_first:
            decision = ranks.broadcast()
            if decision == _CANCELLED:
                raise Cancelled("CLIENT_STOPPED", "rank 0 was stopped")
            return decision == _CONTINUE
        decision = _CANCELLED
        try:
            continues = after_step(done, total)
            decision = _CONTINUE if continues else _END
            return continues
        finally:
            ranks.broadcast(decision)

    return step


@contextlib.contextmanager
def _receive_task(announcement: _Announcement, ranks: Ranks, plugins: Plugins) -> Generator[Task]:
    """Receive the task of rank 0 on another rank."""
    with contextlib.ExitStack() as stack:
        if announcement.shares_file:
            # Algorithms with client state are refused in a layout, so there are no notes.
            parameters, notes = stack.enter_context(share_model(ranks)), dict[str, Parameters]()
        else:
            sizes = msgspec.msgpack.decode(ranks.broadcast(), type=decoding.prepare_type(_Sizes))
            parameters = _receive_parameters(sizes.model)
            notes = {name: _receive_parameters(size) for name, size in sizes.notes.items()}
        yield Task(
            parameters=parameters,
            config=announcement.config,
            plugins=plugins,
            client_state=client_state.ClientState(notes),
            **{name: getattr(announcement, name) for name in _NAMES},
        )


def _send(values: Parameters) -> None:
    distributed.broadcast(torch.frombuffer(bytearray(values.to_bytes()), dtype=torch.uint8), group_src=0)


def _receive_parameters(size_bytes: int) -> Parameters:
    content = torch.empty(size_bytes, dtype=torch.uint8)
    distributed.broadcast(content, group_src=0)
    return Parameters.from_bytes(content.numpy())
