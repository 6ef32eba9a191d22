"""Starts ranks that measure, and hears what they say."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from fedplat.backends.ranks import Backend
from fedplat.backends.ranks.bench.records import Done, Failed, Plan, Progress, Report
from fedplat.errors import MissingExtraError
from fedplat_server.errors import PoolError
from fedplat_server.pool import meeting

try:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch
except ImportError as exc:
    raise MissingExtraError("a pool needs PyTorch, which is not installed: pip install 'fedplat-server[pool]'") from exc

_DECODER = msgspec.json.Decoder(Progress | Done | Failed)


class _Ear:
    """Hears what the ranks say at a Unix socket, in a thread of its own for each."""

    def __init__(self, path: Path, note: Callable[[Progress], None]) -> None:
        self.report: Report | None = None
        self.failures: list[Failed] = []
        self._note = note
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._threads: list[threading.Thread] = []
        threading.Thread(target=self._accept, name="ranks", daemon=True).start()

    def finish(self) -> None:
        """Returns when everything was heard that the ranks, which have ended, have said."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                connection, _ = self._listener.accept()
                thread = threading.Thread(target=self._hear, args=(connection,), name="rank", daemon=True)
                self._threads.append(thread)
                thread.start()

    def _hear(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as lines, contextlib.suppress(ConnectionError):
            for line in lines:
                message: Progress | Done | Failed = _DECODER.decode(line)
                match message:
                    case Progress() as progress:
                        self._note(progress)
                    case Failed() as failure:
                        self.failures.append(failure)
                    case Done(report):
                        self.report = report


def measured(ranks: int, backend: Backend, plan: Plan, note: Callable[[Progress], None]) -> Report:
    """What `ranks` new ranks of this host measure. Raises `PoolError` when they cannot."""
    for name in logging.root.manager.loggerDict:
        if name.startswith("torch.distributed.elastic"):  # what it says of ranks, we say in words
            logging.getLogger(name).setLevel(logging.CRITICAL)
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}
    with tempfile.TemporaryDirectory(prefix="fedplat-bench-") as folder:
        path = Path(folder) / "ranks.sock"
        ear = _Ear(path, note)
        text = msgspec.json.encode(plan).decode()
        arguments = ("-P", "-m", "fedplat.backends.ranks.bench", str(path), backend, text)
        failed = ""
        try:
            elastic_launch(_config(ranks, Path(folder)), sys.executable)(*arguments)
        except SignalException as exc:
            sys.exit(128 + exc.sigval)
        except ChildFailedError as exc:
            failed = _reason(exc, ear.failures)
        finally:
            ear.finish()
    if ear.report is not None and not failed:
        return ear.report
    raise PoolError(f"the ranks could not measure: {failed or 'they ended too early'}")


def _reason(error: ChildFailedError, told: list[Failed]) -> str:
    """What went wrong first: a rank that was killed, or what a rank says, but for what it says of the others' end."""
    for rank, failure in sorted(error.failures.items()):
        if failure.exitcode < 0 and -failure.exitcode != signal.SIGTERM:  # which torchrun sends to those that are left
            return f"rank {rank} was killed by signal {-failure.exitcode}"
    own = sorted(told, key=lambda each: "gloo" in each.text)
    if own:
        return f"rank {own[0].rank}: {own[0].text}"
    [rank, failure] = error.get_first_failure()
    return f"rank {rank} ended with exit status {failure.exitcode}"


def _config(ranks: int, folder: Path) -> LaunchConfig:
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id="fedplat-bench",
        max_restarts=0,
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(),
        **meeting.on_one_host(folder),
    )
    config.signals_to_handle = "SIGTERM,SIGHUP,SIGQUIT"  # not Ctrl-C: torchrun would interrupt the ranks, too
    return config
