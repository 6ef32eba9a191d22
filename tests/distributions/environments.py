"""Empty environments with the built wheels, and processes that know nothing of the repository."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Generator, Sequence
from pathlib import Path

from uv import find_uv_bin

from distributions.building import DistributionError

STOP_S = 60.0
RUN_S = 400
_KEPT = ("LANG", "TMPDIR", "UV_CACHE_DIR", "XDG_CACHE_HOME")
"""Variables that processes get. `HOME` is another one, so uv's cache is named."""


@dataclasses.dataclass(frozen=True)
class Machine:
    """A user's machine: a home folder, and the folders of the commands that were installed there."""

    home: Path
    path: tuple[Path, ...]

    @property
    def environment(self) -> dict[str, str]:
        kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
        path = ":".join([*map(str, self.path), "/usr/bin", "/bin"])
        # Many processes share this machine: with more than one thread each, they would slow each other down.
        return {**kept, "HOME": str(self.home), "PATH": path, "OMP_NUM_THREADS": "1", "GRPC_VERBOSITY": "ERROR"}

    def run(self, script: str, folder: Path) -> str:
        """What the lines of a script print. What they leave running ends with them."""
        whole = f"set -e\ntrap 'kill $(jobs -p) 2>/dev/null || true' EXIT\n{script}"
        command = ["timeout", str(RUN_S), "bash", "-c", whole]
        done = subprocess.run(command, cwd=folder, env=self.environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise DistributionError(f"status {done.returncode} of: {script}\n{done.stdout}{done.stderr}")
        return done.stdout

    @contextlib.contextmanager
    def started(self, command: str, folder: Path) -> Generator[Log]:
        """A process that runs in the folder while the block does, and must then end with 0."""
        path = folder / f"{command.split(maxsplit=1)[0]}.log"
        with path.open("wb") as output:
            process = subprocess.Popen(
                command.split(),
                cwd=folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        log = Log(path, process)
        try:
            yield log
            process.send_signal(signal.SIGINT)
            if status := process.wait(STOP_S):
                raise DistributionError(f"status {status} of: {command}\n{path.read_text()}")
        finally:
            process.kill()
            process.wait()


@dataclasses.dataclass(frozen=True)
class Log:
    """The output of a running process."""

    path: Path
    process: subprocess.Popen[bytes]

    def wait_for(self, prefix: str) -> str:
        """The first line that begins with the prefix. Raises `DistributionError` if the process ends without it."""
        pause = threading.Event()
        for _ in range(int(STOP_S / 0.05)):
            ended = self.process.poll() is not None
            for line in self.path.read_text().splitlines(keepends=True):
                if line.startswith(prefix) and line.endswith("\n"):
                    return line.strip()
            if ended:
                break
            pause.wait(0.05)
        raise DistributionError(f"{prefix!r} was not printed:\n{self.path.read_text()}")


class Installer:
    """Installs from folders of wheels, with uv and without a network, below a folder of its own."""

    def __init__(self, folder: Path, sources: Sequence[Path]) -> None:
        self._folder = folder
        self._offline = ["--quiet", "--offline", "--no-config", "--no-index"]
        self._offline += [option for source in sources for option in ("--find-links", str(source))]

    def make_environment(self, name: str, *requirements: str) -> Path:
        """The Python of an empty environment with these distributions."""
        target = self._folder / name
        self._uv("venv", "--quiet", "--no-config", "--python", sys.executable, str(target))
        python = target / "bin" / "python"
        self._uv("pip", "install", *self._offline, "--python", str(python), *requirements)
        return python

    def install_tool(self, *arguments: str) -> Path:
        """The folder of the commands that `uv tool install` has made."""
        self._uv("tool", "install", *self._offline, "--python", sys.executable, *arguments)
        return self._folder / "bin"

    def _uv(self, *arguments: str) -> None:
        dirs = {"UV_TOOL_DIR": str(self._folder / "tools"), "UV_TOOL_BIN_DIR": str(self._folder / "bin")}
        environment = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"} | dirs
        done = subprocess.run(
            [find_uv_bin(), *arguments], cwd=self._folder, env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise DistributionError(f"uv {' '.join(arguments)}: {done.stderr}")
