"""The daemon's side of ServerApps: it starts their processes, and turns their exchanges into versions.

A version of a Flower job is the message that its app sends next. The state stored with it is the app's checkpoint, so a
process that ends, also with the daemon, is replaced by one that continues with the same exchange. The replies to an
exchange are the updates of a round; they stay in the spool until the next version is stored.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from fedplat.errors import FedplatError
from fedplat.job.tables import require_flower
from fedplat.rounds import AttemptKey, JobState, ModelVersion
from fedplat.rounds.commands import RunWarmStart
from fedplat.rounds.events import AggregationFailed, AttemptAggregated
from fedplat.rounds.protocols.flower_app import cohort_of
from fedplat_server import logs
from fedplat_server.child_environment import child_environment
from fedplat_server.errors import ConfigError, FlowerRunError, is_lasting
from fedplat_server.flower import protocol
from fedplat_server.storage.blobs import Blob, BlobStore

PRESENT_S = 60.0
"""How long a client that the app may use is expected back after it was last seen."""
LIMIT_BYTES = 512 * 2**20
Post = Callable[[AttemptAggregated | AggregationFailed], None]
FindWaiting = Callable[[JobState], Sequence[str]]
"""Returns the clients that wait and may work for a job."""
FindEnrolled = Callable[[JobState, Iterable[str]], Awaitable[Sequence[str]]]
"""Returns those of some clients that may work for a job and are not revoked, in the order of enrollment."""


@dataclasses.dataclass(frozen=True)
class AppStep:
    """The result of an exchange: the files of the next version, and its cohort, which is empty if the app has ended."""

    message: Blob
    state: Blob | None
    cohort: tuple[str, ...]
    metrics: Mapping[str, float]
    refused: Mapping[str, str]


class _Run:
    """The process of a job's app. It waits for the replies to the messages of a version, once it has sent any."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.version = 0
        self.digest = ""
        self.seen: dict[str, float] = {}

    def awaits(self, version: ModelVersion) -> bool:
        """Return whether the process runs and waits for the replies to a version."""
        is_same = (self.version, self.digest) == (version.version, version.digest)
        return is_same and self.process.returncode is None

    async def receive(self, listed: Callable[[], Awaitable[tuple[str, ...]]]) -> protocol.Answer:
        """Return the next answer, and meanwhile tell the app which clients there are."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        while isinstance(answer := await protocol.receive_frame(self.process.stdout), protocol.ListClients):
            await protocol.send_frame(self.process.stdin, protocol.ListedClients(await listed()))
        if isinstance(answer, protocol.RunFailed):
            raise FlowerRunError(answer.text)
        return answer

    async def send(self, request: msgspec.Struct) -> None:
        """Send a request."""
        assert self.process.stdin is not None
        await protocol.send_frame(self.process.stdin, request)

    async def end(self) -> None:
        """End the process."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()


class FlowerRuns:
    """The running ServerApps of a daemon. `apps` has the folders of the apps by name.

    `post` is called with the results of `begin`.
    """

    def __init__(
        self,
        apps: Mapping[str, str],
        data_dir: Path,
        blobs: BlobStore,
        post: Post,
        find_waiting: FindWaiting,
        find_enrolled: FindEnrolled,
    ) -> None:
        self._apps, self._data_dir, self._blobs, self._post = apps, data_dir / "flower", blobs, post
        self._find_waiting, self._find_enrolled = find_waiting, find_enrolled
        self._runs: dict[str, _Run] = {}
        self._open: dict[AttemptKey, asyncio.Task[None]] = {}
        self._made: dict[AttemptKey, list[str]] = {}
        self._ending: set[asyncio.Task[None]] = set()

    @property
    def names(self) -> list[str]:
        """The names of the apps, in their order."""
        return sorted(self._apps)

    def begin(self, job: JobState, command: RunWarmStart) -> None:
        """Start the app of a job; its first exchange is posted as the job's first version."""
        task = asyncio.create_task(self._begin(job, command.key), name=f"Flower app {command.key}")
        self._open[command.key] = task

    def end(self, key: AttemptKey) -> None:
        """Stop `begin` for an attempt that has ended, and settle the files that it has made."""
        if (task := self._open.pop(key, None)) is not None:
            task.cancel()
        if made := self._made.pop(key, None):
            self._blobs.settle(made)

    def forget(self, job_id: str) -> None:
        """End the app of a job that has ended; its folder is kept, since it may have written files."""
        if (run := self._runs.pop(job_id, None)) is not None:
            task = asyncio.create_task(run.end(), name=f"end the Flower app of {job_id}")
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        """End all apps."""
        tasks, self._open = list(self._open.values()), {}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *self._ending, return_exceptions=True)
        for run in self._runs.values():
            await run.end()
        self._runs.clear()

    async def advance(
        self, job: JobState, blobs: BlobStore, replies: Mapping[str, Path], failures: Mapping[str, str]
    ) -> AppStep:
        """Pass the replies of clients to the app of a job, and the reasons of failures; return its next exchange.

        Raises `FlowerRunError` if the app fails.
        """
        run = self._runs.get(job.job_id)
        try:
            if run is None or not run.awaits(job.latest):
                run, continues = await self._start(job)
                if not continues and job.latest.version:
                    logs.get().warning("the Flower app begins anew: it has no checkpoint", job=job.job_id)
                    replies, failures = {}, {}
            run.seen |= dict.fromkeys(replies, time.monotonic())
            files = {client: str(path) for client, path in replies.items()}
            return await self._step(job, run, blobs, files, failures)
        except asyncio.CancelledError:
            await self._discard(job)  # its answer to this exchange will not be read
            raise
        except (EOFError, OSError, ValueError, FedplatError) as exc:
            await self._discard(job)
            if isinstance(exc, FlowerRunError):
                raise
            raise FlowerRunError(f"the process of the Flower app has ended: {exc or type(exc).__name__}") from exc

    async def _begin(self, job: JobState, key: AttemptKey) -> None:
        outcome: AttemptAggregated | AggregationFailed
        logs.bind(**logs.attempt_fields(key))
        blobs = self._blobs.recorder()
        try:
            step = await self.advance(job, blobs, {}, {})
            state_digest = step.state.digest if step.state is not None else ""
            message = step.message
            version = ModelVersion(1, key.round, key.number, message.digest, message.size_bytes, state_digest)
            outcome = AttemptAggregated(key, version, step.metrics, step.cohort)
        except asyncio.CancelledError:
            self._blobs.settle(blobs.made)
            raise
        except (FedplatError, OSError) as exc:
            logs.get().error("a Flower app failed", error=str(exc))
            outcome = AggregationFailed(key, " ".join(str(exc).split())[:1000], is_lasting=is_lasting(exc))
        except Exception as exc:  # a task boundary: out of memory, or a bug; an attempt that never ends blocks its job
            logs.get().exception("a Flower app failed")
            outcome = AggregationFailed(key, type(exc).__name__, is_lasting=is_lasting(exc))
        self._open.pop(key, None)
        self._made[key] = blobs.made
        self._post(outcome)

    async def _step(
        self, job: JobState, run: _Run, blobs: BlobStore, replies: Mapping[str, str], failures: Mapping[str, str]
    ) -> AppStep:
        with blobs.temporary() as message, blobs.temporary() as state:
            await run.send(protocol.AdvanceRun(replies, failures, str(message), str(state)))
            answer = await run.receive(lambda: self._list_clients(job, run))
            if isinstance(answer, protocol.RunEnded):
                digest = Blob(job.latest.digest, job.latest.size_bytes)
                blob = await asyncio.to_thread(blobs.adopt_file, message) if answer.has_model else digest
                self._runs.pop(job.job_id, None)
                return AppStep(blob, None, (), answer.metrics, answer.refused)
            assert isinstance(answer, protocol.NextExchange)
            blob = await asyncio.to_thread(blobs.adopt_file, message)
            kept = await asyncio.to_thread(blobs.adopt_file, state)
        run.version, run.digest = job.latest.version + 1, blob.digest
        return AppStep(blob, kept, answer.cohort, answer.metrics, answer.refused)

    async def _start(self, job: JobState) -> tuple[_Run, bool]:
        """Start the process of a job's app; return whether it continues with the exchange of the latest version."""
        options = require_flower(job.spec)
        await self._discard(job)
        name = options.app
        if name not in self._apps:
            raise ConfigError(f"the server has no Flower app {name!r}; start it with --flower-app {name}=FOLDER")
        folder = self._data_dir / job.job_id
        await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
        arguments = (sys.executable, "-m", "fedplat_server.flower.process")
        environment = child_environment(os.environ) | {"PYTHONSAFEPATH": "1"}
        process = await asyncio.create_subprocess_exec(
            *arguments, stdin=PIPE, stdout=PIPE, cwd=folder, env=environment, limit=LIMIT_BYTES
        )
        run = self._runs[job.job_id] = _Run(process)
        request = protocol.StartRun(
            name, self._apps[name], dict(options.run_config), max_weight_factor=options.max_weight_factor
        )
        async with contextlib.AsyncExitStack() as stack:
            if job.latest.state_digest:
                local = self._blobs.local(job.latest.state_digest, job.latest.digest)
                state, message = map(os.path.abspath, await stack.enter_async_context(local))
                request = msgspec.structs.replace(request, state=state, message=message)
            await run.send(request)
            answer = await run.receive(lambda: self._list_clients(job, run))
        assert isinstance(answer, protocol.RunStarted)
        run.seen = dict.fromkeys((*answer.clients, *cohort_of(job)), time.monotonic())
        return run, answer.continues

    async def _list_clients(self, job: JobState, run: _Run) -> tuple[str, ...]:
        """Return the clients that wait or were seen a short while ago, in the order of their enrollment."""
        now = time.monotonic()
        run.seen |= dict.fromkeys(self._find_waiting(job), now)
        run.seen = {client: seen for client, seen in run.seen.items() if now - seen <= PRESENT_S}
        return tuple(await self._find_enrolled(job, run.seen))

    async def _discard(self, job: JobState) -> None:
        if (run := self._runs.pop(job.job_id, None)) is not None:
            await run.end()
