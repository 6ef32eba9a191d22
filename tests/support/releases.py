"""The released versions of fedplat, from the wheels in `tests/compat/releases`, and this one."""

from __future__ import annotations

import dataclasses
import fcntl
import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from hashlib import sha256
from pathlib import Path

from packaging.version import Version

from support import commands

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "tests" / "compat" / "releases"
_BUILD = ROOT / "build" / "compat"
_CHECK = """
import importlib
for name in ("fedplat", "fedplat_server", "fedplat_client"):
    module = importlib.import_module(name)
    print(name, module.__file__, module.__version__, sep="\\t")
"""


@dataclasses.dataclass(frozen=True)
class Release:
    """A version of fedplat whose programs can be started.

    `server` is the command line of `fedplat-server`, if that is not a program of its own.
    """

    name: str
    bin: Path
    server: tuple[str, ...] = ("fedplat-server",)

    @property
    def python(self) -> str:
        """The interpreter that imports this version."""
        return str(self.bin / "python")

    def command(self, program: str, *arguments: str) -> list[str]:
        """The command line of a program of this version."""
        first, *rest = self.server if program == "fedplat-server" else (program,)
        return [str(self.bin / first), *rest, *arguments]

    def run(self, program: str, *arguments: str) -> str:
        """Run a program to its end; its standard output."""
        done = subprocess.run(
            self.command(program, *arguments), capture_output=True, text=True, check=False, env=environment()
        )
        assert done.returncode == 0, f"{program} {' '.join(arguments)} of {self.name}: {done.stdout}\n{done.stderr}"
        return done.stdout

    def init(self, folder: Path, port: int = 7443, database: str | None = None) -> str:
        """Make the certificates, the database and the first operator; what the command prints."""
        if self == MAIN:
            return commands.init(folder, port, database)
        where = [] if database is None else ["--database", database]
        options = ["--data-dir", str(folder), "--host", "127.0.0.1", "--port", str(port), *where]
        return self.run("fedplat-server", "init", *options)


MAIN = Release("main", Path(sys.executable).parent)


def environment(**more: str) -> dict[str, str]:
    """The environment of a program, without what would make it import another version."""
    ours = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    return ours | more


def names() -> list[str]:
    """The released versions, the oldest first."""
    return sorted((path.name for path in FOLDER.iterdir() if path.is_dir()), key=Version)


def wheels(name: str) -> list[Path]:
    """The wheels of a release: of fedplat, of the client and of the server."""
    found = sorted((FOLDER / name).glob("*.whl"))
    assert len(found) == 3, f"{FOLDER / name}: expected three wheels, found {found}"
    return found


def schema_head(name: str) -> str:
    """The revision of the database schema of a release."""
    steps = (
        re.search(r"/migrations/versions/(\d{4})_\w+\.py$", path)
        for path in zipfile.ZipFile(wheels(name)[2]).namelist()
    )
    return max(found[1] for found in steps if found)


def unpack_migrations(name: str, folder: Path) -> Path:
    """Write the steps of a release's schema into a folder; their place."""
    with zipfile.ZipFile(wheels(name)[2]) as wheel:
        wheel.extractall(folder, [path for path in wheel.namelist() if "/migrations/" in path])
    return folder / "fedplat_server" / "database" / "migrations"


def install(name: str) -> Release:
    """Return a release in an environment of its own, which is made if it does not exist yet.

    fedplat comes from the wheels only. All other packages come from the environment of the tests: they are the same
    for all versions, and large.
    """
    kept = wheels(name)
    packages = sysconfig.get_path("purelib")
    key = sha256(b"".join(path.read_bytes() for path in kept) + f"{sys.prefix} {sys.version}".encode()).hexdigest()
    folder = _BUILD / f"{name}-{key[:12]}"
    _BUILD.mkdir(parents=True, exist_ok=True)
    with (_BUILD / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        release = Release(name, folder / "bin")
        if not (folder / "complete").exists():
            venv.create(folder, clear=True, symlinks=True)
            pip = [
                sys.executable,
                "-m",
                "pip",
                "--python",
                release.python,
                "install",
                "--quiet",
                "--no-index",
                "--no-deps",
            ]
            subprocess.run([*pip, *map(str, kept)], check=True, env=environment())
            (Path(_purelib(release)) / "dependencies.pth").write_text(packages + "\n")
            (folder / "complete").touch()
    found = modules(release)
    assert all(file.is_relative_to(folder) and version == name for file, version in found.values()), found
    return release


def _purelib(release: Release) -> str:
    return release.run("python", "-P", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()


def modules(release: Release) -> dict[str, tuple[Path, str]]:
    """The files and versions of the modules that the programs of a version import."""
    lines = release.run("python", "-P", "-c", _CHECK).splitlines()
    return {name: (Path(file), version) for name, file, version in (line.split("\t") for line in lines)}
