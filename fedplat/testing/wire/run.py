"""Runs a client's command through cases: a process for each, and a sentence for each one that fails."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Literal

import msgspec

from fedplat import system
from fedplat.testing.wire.calls import POPULATION, SECRET
from fedplat.testing.wire.cases import CASES
from fedplat.testing.wire.fleet import ScriptedFleet
from fedplat.testing.wire.grpc_serving import GrpcServer
from fedplat.testing.wire.http_serving import HttpServer
from fedplat.testing.wire.script import Case
from fedplat.testing.wire.serving import ScriptedServer
from fedplat.wire import auth

_LOG_BYTES = 2000
_END_S = 10.0
"""How long a client may take to end."""
Outcome = Literal["passed", "failed", "skipped"]
SERVERS: Mapping[str, type[GrpcServer | HttpServer]] = {"http": HttpServer, "grpc": GrpcServer}
"""The ports of the scripted server by the name of their transport."""


class CaseResult(msgspec.Struct, frozen=True):
    """The result of a case; `log` is the end of what the client has written, if the case failed."""

    name: str
    outcome: Outcome
    reason: str = ""
    log: str = ""


def find_cases(names: Sequence[str]) -> list[Case]:
    """Return the cases with these names, or all. Raises `ValueError` for an unknown name."""
    known = {case.name: case for case in CASES}
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"there is no case {unknown[0]!r}; there are: {', '.join(known)}")
    return [known[name] for name in names] if names else list(CASES)


def run(
    command: str, names: Sequence[str] = (), limit_s: float = 60.0, transport: str = "http"
) -> Iterator[CaseResult]:
    """Run a client's command through cases. Raises `ValueError` if it cannot be started."""
    try:
        arguments = shlex.split(command)
    except ValueError as exc:
        raise ValueError(f"the command {command!r} cannot be read: {exc}") from exc
    if not arguments:
        raise ValueError("the command is empty; expected one that starts a client")
    has_evaluator = True
    for case in find_cases(names):
        if any(task.is_evaluation for task in case.tasks) and not has_evaluator:
            yield CaseResult(case.name, "skipped", "the client has no evaluator")
            continue
        if transport not in case.transports:
            yield CaseResult(case.name, "skipped", f"it is not a case of {transport}")
            continue
        attempt = _Attempt(case, arguments, limit_s, transport)
        yield attempt.run()
        has_evaluator = attempt.fleet.has_evaluator


class _Attempt:
    """One case."""

    def __init__(self, case: Case, command: Sequence[str], limit_s: float, transport: str) -> None:
        self._case = case
        self._command = command
        self._ends_at = time.monotonic() + limit_s
        self._limit_s = limit_s
        self._transport = transport
        self.fleet = ScriptedFleet(case)
        self._process: subprocess.Popen[bytes] | None = None
        self._is_killed = False

    def run(self) -> CaseResult:
        with tempfile.TemporaryDirectory(prefix="fedplat-conformance-") as folder, tempfile.TemporaryFile() as log:
            server = SERVERS[self._transport](self.fleet, self._kill)
            with server.running():
                try:
                    problem = self._follow(server, Path(folder), log)
                finally:
                    self._end()
            if not self.fleet.has_evaluator and any(task.is_evaluation for task in self._case.tasks):
                return CaseResult(self._case.name, "skipped", "the client has no evaluator")
            if not problem:
                return CaseResult(self._case.name, "passed")
            log.seek(0, os.SEEK_END)
            log.seek(max(log.tell() - _LOG_BYTES, 0))
            return CaseResult(self._case.name, "failed", problem, log.read().decode(errors="replace"))

    def _follow(self, server: ScriptedServer, folder: Path, log: IO[bytes]) -> str:
        """Start the client, and return what is wrong when the case is over; empty if nothing is."""
        case, fleet = self._case, self.fleet
        is_told = False
        self._start(server.address, folder, log)
        with server.changed:
            while not fleet.problems:
                assert self._process is not None
                status = self._process.poll()
                if status is not None and self._is_killed:
                    self._is_killed = False
                    self._start(server.address, folder, log)
                    continue
                if status is not None:
                    return self._judge_end(status)
                if fleet.is_over and not case.is_last and not case.stops:
                    return case.check(fleet.sent)
                if case.stops and not is_told and fleet.sent.progress:
                    is_told = True
                    self._process.send_signal(signal.SIGTERM)
                if time.monotonic() > self._ends_at:
                    return f"{fleet.missing} within {self._limit_s:g} s"
                server.changed.wait(0.1)
        return fleet.problems[0]

    def _judge_end(self, status: int) -> str:
        case, fleet = self._case, self.fleet
        if fleet.problems:
            return fleet.problems[0]
        if case.is_last and fleet.ended_by:
            return "" if status else f"the client ended with the exit status 0 after {fleet.ended_by}; expected another"
        if case.stops and fleet.is_over:
            return ""
        if fleet.is_over and not case.is_last:
            return case.check(fleet.sent)
        return f"the client ended with the exit status {status}: {fleet.missing}"

    def _start(self, address: str, folder: Path, log: IO[bytes]) -> None:
        http = address if self._transport == "http" else ""
        ticket = auth.Ticket(address, POPULATION, SECRET, http=http).to_text()
        environment: Mapping[str, str] = {
            **os.environ,
            "FEDPLAT_TICKET": ticket,
            "FEDPLAT_CLIENT_DATA_DIR": str(folder),
            "FEDPLAT_TRANSPORT": self._transport,
        }
        try:
            self._process = subprocess.Popen(
                self._command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as exc:
            raise ValueError(f"the command {self._command[0]!r} cannot be started: {exc.strerror or exc}") from exc

    def _kill(self) -> None:
        self._is_killed = True
        self._signal(system.SIGKILL)

    def _signal(self, number: int) -> None:
        if self._process is not None and self._process.poll() is None:
            system.signal_group(self._process, number)

    def _end(self) -> None:
        self._signal(system.SIGKILL)
        if self._process is not None:
            self._process.wait(_END_S)
