"""A process that has imported the server and forks a daemon for each order: a start costs a fork, not a second.

Orders are lines of JSON on stdin, answers lines of JSON on stdout. It holds no thread and no gRPC of its own, which a
fork would break. When its stdin ends it kills what it has started.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import selectors
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

from fedplat.config.loaded_plugins import load_plugins
from fedplat_server import crash_points, logs
from fedplat_server.config import ServerConfig
from fedplat_server.daemon import Daemon, stop_on_signals
from fedplat_server.database import schema
from fedplat_server.database.store import open_leases
from fedplat_server.storage import blob_objects, segments
from support import access


def main() -> None:
    gc.freeze()  # a collection in a child would touch, and so copy, every page
    selector = selectors.DefaultSelector()
    selector.register(sys.stdin, selectors.EVENT_READ)
    children: dict[int, tuple[int, int]] = {}  # by pidfd: number of the order, pid
    while True:
        for ready, _ in selector.select():
            if ready.fileobj is not sys.stdin:
                number, pid = children.pop(ready.fd)
                selector.unregister(ready.fd)
                os.close(ready.fd)
                _answer(number, status=os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                continue
            line = sys.stdin.readline()
            if not line:
                for _, pid in children.values():
                    os.kill(pid, signal.SIGKILL)
                return
            order = json.loads(line)
            pid = os.fork()
            if pid == 0:
                _child(order)
            handle = os.pidfd_open(pid)
            children[handle] = (order["number"], pid)
            selector.register(handle, selectors.EVENT_READ)
            _answer(order["number"], pid=pid)


def _answer(number: int, **fields: object) -> None:
    # One write: the daemons answer on the same descriptor.
    os.write(1, (json.dumps({"number": number, **fields}) + "\n").encode())


def _child(order: dict[str, Any]) -> None:
    """Runs an order in the child process; never returns."""
    status = 1
    try:
        os.dup2(os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        logs.configure("INFO", json=True)
        os.environ.update(order["environment"])
        blob_objects.MIN_AGE_S = 0.0  # no test takes an hour
        if order["files_only"]:
            segments.MAX_BYTES = 0
        if order["crash_at"]:
            crash_points.arm(order["crash_at"])
        if order["upgrade"]:
            schema.upgrade(order["database"])
            asyncio.run(access.add_operator_to(order["database"]))
        else:
            asyncio.run(_serve(order))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stderr.flush()
        os._exit(status)


async def _serve(order: dict[str, Any]) -> None:
    config = ServerConfig(
        listen="127.0.0.1:0",
        data_dir=Path(order["data_dir"]),
        database=order["database"],
        evaluators=order["evaluators"],
        webhook_networks=tuple(order["webhook_networks"]),
        blobs=order["blobs"],
        spool=order["spool"],
        plugins=load_plugins(order["plugins"]),
        http_listen="127.0.0.1:0" if order["http"] else "",
        http_operators=order["http"],
    )
    if config.is_shared:
        await _bury_the_leader(config.database)
    daemon = Daemon(config)
    with stop_on_signals(daemon.stop):
        running = asyncio.create_task(daemon.run())
        started = asyncio.create_task(daemon.started.wait())
        await asyncio.wait([running, started], return_when=asyncio.FIRST_COMPLETED)
        if started.done():
            _answer(order["number"], port=daemon.http_port or daemon.port)
        started.cancel()
        await running


async def _bury_the_leader(database: str) -> None:
    """Releases the lease of the previous daemon, which is dead, so that the next one need not wait for its end."""
    leases = await open_leases(database)
    try:
        if (lease := (await leases.read()).lease) is not None:
            await leases.release(lease)
    finally:
        await leases.close()


if __name__ == "__main__":
    main()
