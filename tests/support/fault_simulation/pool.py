"""Runs seeds, each in a process forked from this one, which has imported everything and holds no threads."""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import resource
import selectors
import shutil
import signal
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from support import databases
from support.fault_simulation import planted, run

LIMIT_S = 40
"""CPU time after which a simulation counts as one that hangs."""
_MEMORY = Path("/dev/shm")


def run_seeds(seeds: Iterable[int], num_jobs: int, bug: str = "") -> Iterator[dict[str, Any]]:
    """Yields the result of each seed when it is there; `bug` is a fault of `planted`."""
    gc.collect()
    gc.freeze()  # a collection in a child would touch, and so copy, every page
    waiting, selector = iter(seeds), selectors.DefaultSelector()
    with tempfile.TemporaryDirectory(dir=_MEMORY if _MEMORY.is_dir() else None) as folder:
        databases.create_sqlite(Path(folder) / "template")  # once for all that are forked
        while True:
            while len(selector.get_map()) < num_jobs and (seed := next(waiting, None)) is not None:
                pid, reader = _fork(seed, Path(folder) / str(seed), bug)
                selector.register(reader, selectors.EVENT_READ, (seed, pid, bytearray()))
            if not selector.get_map():
                return
            for key, _ in selector.select():
                seed, pid, received = key.data
                part = os.read(key.fd, 1 << 16)
                received += part
                if not part:
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                    shutil.rmtree(Path(folder) / str(seed), ignore_errors=True)
                    yield json.loads(received) if received else _lost(seed, status)


def _fork(seed: int, folder: Path, bug: str) -> tuple[int, int]:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writer)
        return pid, reader
    try:
        faulthandler.register(signal.SIGXCPU, chain=True)
        resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_S, LIMIT_S + 1))
        folder.mkdir()
        if bug:
            planted.plant(bug)
        result = json.dumps(run.run(seed, folder)).encode()
        with open(writer, "wb") as file:
            file.write(result)
    finally:
        os._exit(0)


def _lost(seed: int, status: int) -> dict[str, Any]:
    """The result of a simulation that gave none."""
    finding = f"the simulation ended with status {status}; it may take {LIMIT_S} s of CPU time"
    return {"seed": seed, "findings": [finding], "plan": "", "last": [], "happened": {}, "reached": {}, "cpu_s": 0.0}
