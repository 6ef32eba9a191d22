"""Ranks for tests: real processes that form a real group, and call functions of the tests."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

from support import ports

TESTS = Path(__file__).resolve().parents[2]
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1"}

SHARED_GPU = os.environ.get("SHARED_GPU") == "1"


class RankError(Exception):
    """A function of the test raised on a rank, or the rank is gone."""


class RankGroup:
    """The ranks of one group. `call` runs a function on all of them at once."""

    def __init__(self, connections: Sequence[socket.socket]) -> None:
        self._streams = [connection.makefile("rwb", buffering=0) for connection in connections]

    def begin(self, call: str, **arguments: object) -> None:
        """Makes every rank call `module:function` with its `Ranks` and the arguments."""
        for stream in self._streams:
            with contextlib.suppress(BrokenPipeError):  # a rank that is gone
                stream.write(json.dumps({"call": call, "arguments": arguments}).encode() + b"\n")

    def result(self, rank: int) -> Any:
        """What a rank's function returned. Raises `RankError` with the text of the rank's own error."""
        line = self._streams[rank].readline()
        if not line:
            raise RankError("gone")
        reply = json.loads(line)
        if "error" in reply:
            error = RankError(f"{reply['error']}: {reply['text']}")
            error.add_note(reply["traceback"])
            raise error
        return reply["result"]

    def wait_until_joined(self) -> None:
        """Raises `RankError` with the error of the first rank that cannot join."""
        for rank in range(len(self._streams)):
            self.result(rank)

    def close(self) -> None:
        """Lets the ranks end."""
        for stream in self._streams:
            stream.close()

    def call(self, call: str, **arguments: object) -> list[Any]:
        """What the function returned on every rank."""
        self.begin(call, **arguments)
        return [self.result(rank) for rank in range(len(self._streams))]


class Zygote:
    """Forks groups of ranks."""

    def __init__(self) -> None:
        self._control, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = os.pathsep.join([str(TESTS), *sys.path])
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("zygote.py")), str(other.fileno())],
            env={**os.environ, **ENVIRONMENT, "PYTHONPATH": path},
            pass_fds=[other.fileno()],
            start_new_session=True,
        )
        other.close()

    @contextlib.contextmanager
    def group(self, count: int, **environment: str) -> Generator[RankGroup]:
        """A group of `count` ranks; they end with the context. A program that takes rank 0's port first has it."""
        with contextlib.ExitStack() as stack:
            try:
                group = stack.enter_context(self._start(count, environment))
                group.wait_until_joined()
            except RankError as exc:
                if "EADDRINUSE" not in str(exc):
                    raise
                group = stack.enter_context(self._start(count, environment))
                group.wait_until_joined()
            yield group

    @contextlib.contextmanager
    def _start(self, count: int, environment: Mapping[str, str]) -> Generator[RankGroup]:
        with contextlib.ExitStack() as stack:
            pairs = [socket.socketpair() for _ in range(count)]
            backend = environment.get("BACKEND", "gloo")
            request = {
                "environment": {"MASTER_PORT": str(ports.free_port()), **environment},
                "ranks": [environment_of(rank, count, backend) for rank in range(count)],
            }
            socket.send_fds(self._control, [json.dumps(request).encode()], [theirs.fileno() for _, theirs in pairs])
            for ours, theirs in pairs:
                stack.enter_context(ours)
                theirs.close()
            yield stack.enter_context(contextlib.closing(RankGroup([ours for ours, _ in pairs])))

    def close(self) -> None:
        self._control.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # with every rank that it forked
        self._process.wait()


def environment_of(rank: int, count: int, backend: str) -> dict[str, str]:
    """The variables that a launcher sets for a rank."""
    place = {"RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(count)}
    if backend == "nccl" and SHARED_GPU:
        # NCCL refuses two ranks of one host on one GPU, so each is on a host of its own, as far as NCCL knows.
        place |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "NCCL_HOSTID": f"rank{rank}"}
        place |= {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    return place
