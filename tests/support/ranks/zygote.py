"""A process that has imported PyTorch once, and forks ranks, so that a group of them starts quickly."""

from __future__ import annotations

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
    """Runs the calls of the test on this rank, until the test closes the connection."""
    with (
        connection.makefile("rwb", buffering=0) as stream,
        join_group(cast(Backend, os.environ.get("BACKEND", "gloo"))) as ranks,
    ):
        for line in stream:
            request = json.loads(line)
            module, _, name = request["call"].partition(":")
            try:
                result = getattr(importlib.import_module(module), name)(ranks, **request["arguments"])
                reply = {"result": result}
            except Exception as exc:
                reply = {"error": type(exc).__name__, "text": str(exc), "traceback": traceback.format_exc()}
            stream.write(json.dumps(reply).encode() + b"\n")


if __name__ == "__main__":
    main()
