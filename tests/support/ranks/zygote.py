"""A process that has imported PyTorch once, and forks ranks, so that a group of them starts quickly."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import socket
import sys
import traceback
from typing import cast

from fedplat.pytorch.distributed import Backend, join_group


def main() -> None:
    importlib.import_module("fedplat.pytorch.server")  # once, not in each rank
    control = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # this process does not wait for the ranks
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 65536, 64)
        if not message:
            return
        request = json.loads(message)
        for rank, descriptor in enumerate(descriptors):
            if os.fork() == 0:
                control.close()
                for other in descriptors:
                    if other != descriptor:
                        os.close(other)
                os.environ.update(request["environment"] | request["ranks"][rank])
                serve(socket.socket(fileno=descriptor))
                os._exit(0)
        for descriptor in descriptors:
            os.close(descriptor)


def serve(connection: socket.socket) -> None:
    """Runs the calls of the test on this rank, until the test closes the connection. The first reply: it has joined."""
    with contextlib.ExitStack() as stack:
        stream = stack.enter_context(connection.makefile("rwb", buffering=0))
        try:
            ranks = stack.enter_context(join_group(cast(Backend, os.environ.get("BACKEND", "gloo"))))
        except Exception as exc:
            stream.write(error_of(exc))
            return
        stream.write(b'{"result": "joined"}\n')
        for line in stream:
            request = json.loads(line)
            module, _, name = request["call"].partition(":")
            try:
                result = getattr(importlib.import_module(module), name)(ranks, **request["arguments"])
                reply = json.dumps({"result": result}).encode() + b"\n"
            except Exception as exc:
                reply = error_of(exc)
            stream.write(reply)


def error_of(exc: Exception) -> bytes:
    """The reply that has the error of this rank."""
    error = {"error": type(exc).__name__, "text": str(exc), "traceback": traceback.format_exc()}
    return json.dumps(error).encode() + b"\n"


if __name__ == "__main__":
    main()
