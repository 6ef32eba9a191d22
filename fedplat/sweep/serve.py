"""The program of a sweep's worker process: it reads the setup and requests from stdin, and writes replies to stdout.

The process ends with the sweep, even if the sweep is killed, so no two processes write to a run folder.
"""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import sys
from typing import BinaryIO

from fedplat.sweep.worker import SweepWorker, WorkerReply, decode_request, decode_setup, encode_line

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> None:
    """Serve requests on stdin until it is closed."""
    # The kernel ends this process when the sweep ends, even if the sweep is killed.
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)
    # User code may print: what it writes to stdout goes to stderr, and only replies to the sweep.
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    worker = SweepWorker(decode_setup(sys.stdin.buffer.readline()))
    send = functools.partial(_send, replies)
    while line := sys.stdin.buffer.readline():
        send(worker.run(decode_request(line), send))


def _send(stream: BinaryIO, reply: WorkerReply) -> None:
    stream.write(encode_line(reply))


if __name__ == "__main__":
    main()
