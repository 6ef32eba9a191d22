"""The program of a sweep's worker process: it reads the setup and requests from stdin, and writes replies to stdout.

The process ends with the sweep, even if the sweep is killed, so no two processes write to a run folder.
"""

from __future__ import annotations

import functools
import os
import queue
import sys
import threading
from collections.abc import Callable
from typing import BinaryIO

from fedplat import system
from fedplat.sweep.worker import SweepWorker, WorkerReply, decode_request, decode_setup, encode_line


def main() -> None:
    """Serve requests on stdin until it is closed."""
    # The end of the sweep ends this process, even if the sweep is killed.
    read = sys.stdin.buffer.readline if system.kill_with_parent() else _read_until_end()
    # User code may print: what it writes to stdout goes to stderr, and only replies to the sweep.
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    worker = SweepWorker(decode_setup(read()))
    send = functools.partial(_send, replies)
    while line := read():
        send(worker.run(decode_request(line), send))


def _read_until_end() -> Callable[[], bytes]:
    """Return the function that reads lines of stdin; its end, which is that of the sweep, ends this process at once."""
    lines = queue.SimpleQueue[bytes]()

    def forward() -> None:
        while line := sys.stdin.buffer.readline():
            lines.put(line)
        os._exit(1)

    threading.Thread(target=forward, name="sweep-requests", daemon=True).start()
    return lines.get


def _send(stream: BinaryIO, reply: WorkerReply) -> None:
    stream.write(encode_line(reply))


if __name__ == "__main__":
    main()
