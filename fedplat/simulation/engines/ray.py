"""An engine of several machines: a Ray cluster and its persistent actors, each with the module and data of clients.

Members of a cluster exchange pickled objects: any program that can reach its ports can run code on all its machines.

Tasks are sent to the actor with the fewest tasks, the longest first, with their client's state; the answer has the new
state. Versions and data are in Ray's object store, which copies them to each machine once.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Generator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from typing_extensions import override

from fedplat import errors, extras, learner, system
from fedplat.errors import EngineError
from fedplat.model import Parameters, Schema
from fedplat.simulation.engines import worker_pool
from fedplat.simulation.engines.interface import ClientTask, LocalUpdate
from fedplat.simulation.engines.ray_worker import Answer, DataShards, Piece, RayWorker, make_piece, make_trainer
from fedplat.simulation.engines.tasks import (
    NO_UPDATE,
    ClientStates,
    ClientTraining,
    Contents,
    FederationEngine,
    Versions,
    WorkQueue,
    num_examples,
)

_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_DEDUP_LOGS": "0"}
"""Settings against usage reports to Ray's developers, and against warnings that do not apply here."""
_FOR_MODELS = 1 << 30
"""Bytes of a local cluster's object store for versions and updates; what does not fit is written to disk."""
_MAX_MEMORY_SHARE = 0.3
"""The largest part of this machine's memory that a local cluster uses for objects."""


class _State:
    """The number of engines of this process that use Ray; `home` is the folder of a local cluster's files."""

    users = 0
    home: tempfile.TemporaryDirectory[str] | None = None


class Cluster:
    """One use of this process's cluster: the one at `address` or RAY_ADDRESS, or a local one.

    A local cluster has room for `data_bytes` of data. Raises `MissingExtraError` without Ray, and `EngineError` if
    there is no cluster at the address or it has too few cores.
    """

    def __init__(self, num_workers: int, data_bytes: int, address: str | None = None) -> None:
        self.ray = _import_ray()
        address = address or os.environ.get("RAY_ADDRESS")
        if not self.ray.is_initialized():
            with _restored_settings():
                self._join(address) if address else self._start(num_workers or _cores(), data_bytes)
        _State.users += 1
        self._is_left = False
        self.is_own = _State.home is not None
        self.num_workers = num_workers or (_cores() if self.is_own else max(1, self._cpus()))
        if not self.is_own and self.num_workers > self._cpus():
            self.leave()
            raise errors.UnsuitableEngineError(
                f'engine = "ray": the cluster has {self._cpus()} cores; expected at least one for each of '
                f"{self.num_workers} workers. Use fewer workers, or 0 for as many as there are cores"
            )

    def leave(self) -> None:
        """End this use, and the cluster if it is local and has no other user."""
        if self._is_left:
            return
        self._is_left = True
        _State.users -= 1
        if not _State.users and _State.home is not None:
            self.ray.shutdown()
            _State.home.cleanup()
            _State.home = None

    def _cpus(self) -> int:
        return int(self.ray.cluster_resources().get("CPU", 0))

    def _join(self, address: str) -> None:
        try:
            self.ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, RuntimeError, ValueError, OSError) as exc:
            reason = str(exc).strip().partition("\n")[0]
            raise errors.EngineError(
                f'engine = "ray": no Ray cluster answers at {address}: {reason}. Start one with `ray start --head`, or '
                "unset RAY_ADDRESS to use only this machine"
            ) from exc

    def _start(self, num_workers: int, data_bytes: int) -> None:
        # A short name: Ray creates sockets in this folder, and the path of a socket has at most 107 bytes.
        home = tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True)
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        try:
            self.ray.init(
                address="local",
                num_cpus=num_workers,
                num_gpus=0,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                object_store_memory=int(min(data_bytes + _FOR_MODELS, _MAX_MEMORY_SHARE * memory)),
                _temp_dir=home.name,
            )
        except (ConnectionError, RuntimeError, ValueError, OSError) as exc:
            home.cleanup()
            raise errors.EngineError(f'engine = "ray": Ray could not be started: {exc}') from exc
        _State.home = home


def _import_ray() -> Any:
    with _restored_settings():
        try:
            import ray  # pyright: ignore[reportMissingImports]
        except ModuleNotFoundError as exc:
            raise errors.MissingExtraError(
                f'engine = "ray" needs Ray; install it with: {extras.install_command("ray")}, or use "processes"'
            ) from exc
    return ray


def _cores() -> int:
    return system.num_cores()


@contextlib.contextmanager
def _restored_settings() -> Generator[None]:
    """Set `_QUIET` in the environment, where Ray reads it; restore it and the SIGTERM handler, which Ray replaces."""
    before = {name: os.environ.get(name) for name in _QUIET}
    os.environ.update(_QUIET)
    is_main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if is_main and handler is not None:
            signal.signal(signal.SIGTERM, handler)
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


_AHEAD = 2
"""Tasks of an actor at once: it trains one while the data of the other is transferred."""
_START_S = 120.0
"""The time within which all actors must start."""


class _Sent(NamedTuple):
    number: int
    task: ClientTask
    worker: int


class RayEngine(FederationEngine):
    """Trains clients in `num_workers` actors, one thread each; 0 stands for one for each core of the cluster.

    `address` or RAY_ADDRESS names the cluster; without either, the engine starts a local cluster and ends it in
    `close`. Raises `MissingExtraError`, and `EngineError` for a cluster or actors that do not answer.
    """

    def __init__(self, task: ClientTraining, num_workers: int = 0, address: str | None = None) -> None:
        self._federation = task.federation
        self._trainer = make_trainer(task.learner, task.options, task.seed, task.num_rounds)
        self._is_module = not isinstance(task.learner, learner.ArrayLearner)
        data = (task.federation.inputs, task.federation.test_inputs)
        self._cluster = Cluster(num_workers, sum(array.nbytes for array in data), address)
        self._ray = self._cluster.ray
        self.num_workers = self._cluster.num_workers
        self._actors: list[Any] = []
        self._names: list[str] = []
        try:
            self._start(task)
            self._pieces = DataShards(task.federation, task.federation.parts, self._put_piece)
            self._held_out = DataShards(task.federation, task.federation.held_out, self._put_piece)
        except BaseException:
            self.close()
            raise
        self._loads = [0] * self.num_workers
        self._test: list[tuple[int, Any]] = []
        self._models: dict[int, Any] = {}
        self._versions = Versions(self._forget)
        self._states = ClientStates[bytes]()
        self._queue = WorkQueue[Answer](self._versions, self.num_examples)
        self._sent: dict[Any, _Sent] = {}
        self._schema: Schema | None = None
        self._failure = ""

    @override
    def publish(self, version: int, model: Parameters) -> None:
        self._trainer.check(model)
        self._schema = model.schema
        self._models[version] = self._ray.put((model.schema, model.buffer))

    @override
    def begin(self, tasks: Sequence[ClientTask]) -> None:
        self._queue.begin(tasks)
        self._send()

    @override
    def result(self, task: ClientTask) -> LocalUpdate:
        """Wait for a task. Raises what the training raised, by `make_error`; `EngineError` if an actor was lost."""
        while not self._queue.has_answer(task):
            self._receive()
        answer = self._queue.fetch(task)
        if answer.failure is not None:
            raise answer.failure.error()
        if answer.note is not None:
            self._states.put(task, answer.note)
        if task.scores:
            return LocalUpdate(NO_UPDATE, num_examples(self._federation, task, answer.num_examples), answer.metrics)
        assert self._schema is not None
        assert answer.update is not None
        # A copy, because the store's memory is read-only and is freed with the cluster.
        update = Parameters(self._schema.uploaded, answer.update.copy())
        return LocalUpdate(update, num_examples(self._federation, task, answer.num_examples), answer.metrics)

    @override
    def drop(self, task: ClientTask) -> None:
        if task in self._queue:
            self._queue.drop(task)
        else:
            self._states.undo(task)

    @override
    def client_states(self) -> Mapping[int, Contents]:
        return {client: worker_pool.unpack_state(note) for client, note in self._states}

    @override
    def set_client_states(self, client_states: Mapping[int, Contents]) -> None:
        self._states.replace({client: worker_pool.pack_state(contents) for client, contents in client_states.items()})

    @override
    def evaluate(self, model: Parameters) -> Mapping[str, float]:
        """Score a model on the central test data: each actor a part of it, or one actor all of it if it has metrics.

        The mean of parts is not the value of every metric.
        """
        total = len(self._federation.test_targets)
        if not total:
            return {}
        if not self._test:
            self._place_test(total)
        placed = self._ray.put((model.schema, model.buffer))
        parts = [
            (size, actor.score.remote(placed, piece))
            for actor, (size, piece) in zip(self._actors, self._test, strict=False)
        ]
        scores: dict[str, float] = {}
        for number, (size, reference) in enumerate(parts):
            answer = self._answer(reference, number, "while it scored a model")
            if answer.failure is not None:
                raise answer.failure.error()
            for name, value in answer.metrics.items():
                scores[name] = scores.get(name, 0.0) + value * size / total
        return scores

    @override
    def close(self) -> None:
        """End the actors, and the cluster if it is local and has no other user."""
        for actor in self._actors:
            self._ray.kill(actor)
        self._actors = []
        self._cluster.leave()

    def _start(self, task: ClientTraining) -> None:
        """Start all actors, one core each; in a local cluster they reserve none, because it runs nothing else."""
        num_cpus = 0 if self._cluster.is_own else 1
        make = self._ray.remote(RayWorker).options(num_cpus=num_cpus, scheduling_strategy="SPREAD")
        self._actors = [make.remote(list(sys.path)) for _ in range(self.num_workers)]
        try:
            # Pickled only now: the actors' sys.path must have the folders of the user's modules first.
            placed = self._ray.put((task.learner, task.options, task.seed, task.num_rounds))
            loaded = [actor.load.remote(placed) for actor in self._actors]
            self._names = self._ray.get(loaded, timeout=_START_S)
        except self._ray.exceptions.GetTimeoutError as exc:
            raise EngineError(
                f'engine = "ray": not all of {self.num_workers} actors started within {_START_S:.0f} s; other programs '
                "may use the cluster's cores. Use fewer workers, or wait"
            ) from exc
        except self._ray.exceptions.RayError as exc:
            raise EngineError(f'engine = "ray": an actor could not start: {_last_line(exc)}') from exc
        except TypeError as exc:
            reason = exc.__cause__ or exc  # Ray's own message is a page long
            raise errors.UnsuitableEngineError(
                f'engine = "ray": the module or its loss cannot be sent to actors: {reason}'
            ) from exc

    def _place_test(self, total: int) -> None:
        data = self._federation
        num_parts = min(self.num_workers, total) if self._trainer.splits_test else 1
        bounds = np.linspace(0, total, num_parts + 1).astype(int).tolist()
        for start, stop in itertools.pairwise(bounds):
            piece = data.test_inputs[start:stop], data.test_targets[start:stop]
            self._test.append((stop - start, self._put_piece(piece)))

    def _put_piece(self, piece: Piece) -> Any:
        return self._ray.put(make_piece(*piece, self._is_module))

    def _forget(self, version: int) -> None:
        del self._models[version]
        for actor in self._actors:
            actor.retire.remote(version)

    def _send(self) -> None:
        while min(self._loads) < _AHEAD and (drawn := self._queue.draw()):
            number, task = drawn
            worker = self._loads.index(min(self._loads))
            piece, span = (self._held_out if task.scores else self._pieces).place(task.client)
            answer = self._actors[worker].answer
            reference = answer.remote(task, span, self._states.begin(task), self._models[task.version], piece)
            self._sent[reference] = _Sent(number, task, worker)
            self._loads[worker] += 1

    def _receive(self) -> None:
        if self._failure:
            raise EngineError(self._failure)
        ready, _ = self._ray.wait(list(self._sent), num_returns=1)
        for reference in ready:
            sent = self._sent[reference]
            first = next(each for each in self._sent.values() if each.worker == sent.worker)  # an actor works in order
            answer = self._answer(reference, sent.worker, f"while it trained client {first.task.client}")
            del self._sent[reference]
            self._loads[sent.worker] -= 1
            self._queue.put(sent.number, answer)
        self._send()

    def _answer(self, reference: Any, worker: int, about: str) -> Answer:
        """Return an actor's answer. Raises `EngineError` in every call after an actor was lost."""
        if not self._failure:
            try:
                return self._ray.get(reference)
            except self._ray.exceptions.RayError as exc:
                self._failure = (
                    f"the Ray actor {self._names[worker]} was lost {about} ({type(exc).__name__}); it probably ran out "
                    "of memory, or its machine failed: use fewer workers or smaller batches"
                )
                raise EngineError(self._failure) from exc
        raise EngineError(self._failure)


def _last_line(exc: Exception) -> str:
    lines = [line.strip() for line in str(exc).splitlines() if line.strip()]
    return lines[-1] if lines else type(exc).__name__
