"""The kinds of external trainers, by the word before the colon: `--trainer NAME=exec:PROGRAM`."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from fedplat_client.trainers.external.container import ENGINES, ContainerLauncher, is_fixed, remove_container
from fedplat_client.trainers.external.folder import TaskFolder
from fedplat_client.trainers.external.launcher import Launcher
from fedplat_client.trainers.external.manual import FolderLauncher
from fedplat_client.trainers.external.process import ProgramLauncher, end_processes
from fedplat_client.trainers.external.slurm import SlurmLauncher, cancel_jobs

_ALWAYS_PASSED = (
    *("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR"),
    *("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"),
)
"""Variables that programs get without being named; none of them is a secret."""
_OWN_PREFIX = "FEDPLAT_"
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, kw_only=True)
class ExternalOptions:
    """What the owner of a client sets for all external trainers."""

    pass_env: tuple[str, ...] = ()
    """Names of further variables that programs get. Raises `ValueError` for those of fedplat, such as the ticket."""
    sbatch: tuple[str, ...] = ()
    """Further options of `sbatch`."""
    container: tuple[str, ...] = ()
    """Further options of `docker run` or `podman run`."""

    def __post_init__(self) -> None:
        for name in self.pass_env:
            if not _VARIABLE.fullmatch(name) or name.startswith(_OWN_PREFIX):
                raise ValueError(
                    f"--pass-env {name!r} is refused; expected the name of a variable, and none of fedplat's own, "
                    "since they hold secrets"
                )

    def read_environment(self, names: Sequence[str] = _ALWAYS_PASSED) -> dict[str, str]:
        """Return the variables that a program gets."""
        return {name: os.environ[name] for name in (*names, *self.pass_env) if name in os.environ}


def _make_program(rest: str, options: ExternalOptions) -> Launcher:
    return ProgramLauncher(_read_command(rest), options.read_environment())


def _make_slurm(rest: str, options: ExternalOptions) -> Launcher:
    for name in ("sbatch", "squeue", "scancel"):
        if shutil.which(name) is None:
            raise ValueError(f"the command {name} of Slurm is not in PATH; run this on a machine that submits jobs")
    return SlurmLauncher(_read_command(rest), options.sbatch, options.read_environment(()))


def _make_container(rest: str, options: ExternalOptions) -> Launcher:
    image, *command = _split(rest) or ("",)
    if not is_fixed(image):
        raise ValueError(
            f"the image {image!r} is not named by its content; expected NAME@sha256:DIGEST or sha256:ID, as "
            "`docker images --digests` and `docker images --no-trunc` show them"
        )
    engine = next(filter(None, map(shutil.which, ENGINES)), None)
    if engine is None:
        raise ValueError(f"there is neither {' nor '.join(ENGINES)} in PATH; install one of them")
    environment = options.read_environment((*_ALWAYS_PASSED, "DOCKER_HOST", "DOCKER_CONTEXT", "XDG_RUNTIME_DIR"))
    return ContainerLauncher(engine, image, tuple(command), options.container, environment, options.pass_env)


def _make_folder(rest: str, options: ExternalOptions) -> Launcher:
    if rest:
        raise ValueError(f"folder: has no command, since it starts none; remove {rest!r}")
    return FolderLauncher()


KINDS: Mapping[str, Callable[[str, ExternalOptions], Launcher]] = MappingProxyType(
    {"exec": _make_program, "container": _make_container, "slurm": _make_slurm, "folder": _make_folder}
)
"""What makes a launcher, from what follows the colon."""


def _remove_by(engine: str) -> Callable[[TaskFolder], None]:
    return lambda folder: remove_container(engine, folder)


ENDERS: Mapping[str, Callable[[TaskFolder], None]] = MappingProxyType(
    {"exec": end_processes, "slurm": cancel_jobs, **{engine: _remove_by(engine) for engine in ENGINES}}
)
"""What ends the work on a folder that an earlier process has left, by the kind in the folder."""
CONTINUED = frozenset({"slurm", "folder"})
"""The kinds whose work outlives a client that was killed: the next one continues it."""


def make_launcher(kind: str, rest: str, options: ExternalOptions) -> Launcher:
    """Return the launcher of a kind. Raises `ValueError` for a command that cannot be used."""
    return KINDS[kind](rest, options)


def _read_command(text: str) -> tuple[str, ...]:
    """Return a program that exists, by its absolute path, and its arguments. Raises `ValueError`."""
    program, *arguments = _split(text) or ("",)
    found = shutil.which(program)
    if found is None:
        raise ValueError(
            f"the program {program!r} is not found, or not executable; expected a program in PATH or the path of one"
        )
    for each in arguments:
        if not os.path.isabs(each) and Path(each).is_file():
            raise ValueError(
                f"the argument {each!r} is a file here, but programs run in their task folder; write "
                f"{str(Path(each).resolve())!r}"
            )
    return (os.path.abspath(found), *arguments)


def _split(text: str) -> list[str]:
    """Split a command line at its spaces, with quotation marks as in a shell, which does not run."""
    try:
        return shlex.split(text)
    except ValueError as exc:
        raise ValueError(f"the command {text!r} cannot be read: {exc}") from exc
