"""Start ranks that run the benchmark, and receive their reports."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socketserver
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from typing_extensions import override

from fedplat.pytorch.distributed import Backend
from fedplat.pytorch.distributed.bench.records import BenchFailed, BenchFinished, BenchPlan, BenchReport, BenchStep
from fedplat_server.errors import PoolError
from fedplat_server.workers import torchrun

LIBRARY_PROGRAM = ("-P", "-m", "fedplat.pytorch.distributed.bench")
"""Python's arguments for ranks that measure the library's collectives."""
_decoder: msgspec.json.Decoder[BenchStep | BenchFinished | BenchFailed] = msgspec.json.Decoder(
    BenchStep | BenchFinished | BenchFailed
)


class _ResultServer(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    """The server that ranks send their results to, with a thread for each; leaving the context joins the threads."""

    def __init__(self, path: Path, note: Callable[[BenchStep], None]) -> None:
        super().__init__(str(path), _Connection)
        self.note = note
        self.report: BenchReport | None = None
        self.failures: list[BenchFailed] = []


class _Connection(socketserver.StreamRequestHandler):
    """The connection of one rank, with lines of JSON."""

    @override
    def handle(self) -> None:
        results = self.server
        assert isinstance(results, _ResultServer)
        with contextlib.suppress(ConnectionError):  # the rank was killed
            for line in self.rfile:
                match _decoder.decode(line):
                    case BenchStep() as step:
                        results.note(step)
                    case BenchFailed() as failure:
                        results.failures.append(failure)
                    case BenchFinished(report):
                        results.report = report


def measure(
    num_ranks: int,
    backend: Backend,
    plan: BenchPlan,
    note: Callable[[BenchStep], None],
    program: Sequence[str] = LIBRARY_PROGRAM,
) -> BenchReport:
    """Start ranks on this host that measure a plan; return their report. Raises `PoolError` if they fail."""
    for name in logging.root.manager.loggerDict:
        if name.startswith("torch.distributed.elastic"):  # `_find_reason` reports the cause in one sentence
            logging.getLogger(name).setLevel(logging.CRITICAL)
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}
    error: torchrun.ChildFailedError | None = None
    with tempfile.TemporaryDirectory(prefix="fedplat-bench-") as folder:
        path = Path(folder) / "ranks.sock"
        with _ResultServer(path, note) as results:
            threading.Thread(target=results.serve_forever, args=(0.05,), name="results", daemon=True).start()
            config = torchrun.make_config(num_ranks, torchrun.meet_on_one_host(Path(folder)))
            config.signals_to_handle = "SIGTERM,SIGHUP,SIGQUIT"  # not Ctrl-C: torchrun would interrupt the ranks, too
            try:
                arguments = (*program, str(path), backend, msgspec.json.encode(plan).decode())
                torchrun.elastic_launch(config, sys.executable)(*arguments)
            except torchrun.SignalException as exc:
                sys.exit(128 + exc.sigval)
            except torchrun.ChildFailedError as exc:
                error = exc
            finally:
                results.shutdown()
    if error is not None:
        raise PoolError(f"the ranks could not measure: {_find_reason(error, results.failures)}") from error
    if results.report is None:
        raise PoolError("the ranks could not measure: they ended too early")
    return results.report


def _find_reason(error: torchrun.ChildFailedError, reported: Sequence[BenchFailed]) -> str:
    """Return the first cause: a rank that was killed, or a rank's own failure, rather than a lost connection."""
    for rank, failure in sorted(error.failures.items()):
        # torchrun sends SIGTERM to the remaining ranks.
        if failure.exitcode < 0 and -failure.exitcode != signal.SIGTERM:
            return f"rank {rank} was killed by signal {-failure.exitcode}"
    if failures := sorted(reported, key=lambda each: "gloo" in each.text):
        return f"rank {failures[0].rank}: {failures[0].text}"
    [rank, failure] = error.get_first_failure()
    return f"rank {rank} ended with exit status {failure.exitcode}"
