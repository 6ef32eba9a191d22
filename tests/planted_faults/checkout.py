"""A copy of a checkout with an environment of its own, in which faults are planted and tests run.

Every process that a test starts must import the copy, also through console scripts and with a clean environment. So
the copy has its own `.venv`, with links to the packages of the checkout, and with scripts and editable installs of its
own.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import NamedTuple

from planted_faults.catalog import Fault

LIMIT_S = 900.0
"""The time limit of one run of tests. Each test has a shorter one."""
TEST_LIMIT_S = 60
_EDITABLE = re.compile(r"'[^']*?/((?:client/|server/)?fedplat\w*/__init__\.py)'")
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", re.MULTILINE)


class Outcome(NamedTuple):
    """The end of a run of tests: those that failed, and the CPU seconds of all its processes."""

    failed: tuple[str, ...]
    cpu_s: float


@contextlib.contextmanager
def copied(checkout: Path) -> Generator[Path]:
    """Yield a copy of the files of a checkout that git does not ignore, in memory if there is a file system for it."""
    memory = Path("/dev/shm")
    place = memory if os.access(memory, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="planted-", dir=place, ignore_cleanup_errors=True) as folder:
        root = Path(folder) / "checkout"
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=checkout,
            check=True,
            capture_output=True,
        ).stdout
        for name in map(os.fsdecode, filter(None, listed.split(b"\0"))):
            if (checkout / name).is_file():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(checkout / name, root / name)
        _link_environment(checkout / ".venv", root)
        yield root


def _link_environment(source: Path, root: Path) -> None:
    target = root / ".venv"
    (packages,) = source.glob("lib/python*/site-packages")
    ours = target / packages.relative_to(source)
    ours.mkdir(parents=True)
    (target / "bin").mkdir()
    for path in packages.iterdir():
        if path.name.startswith("_editable_impl_") and path.suffix == ".py":
            (ours / path.name).write_text(_EDITABLE.sub(rf"'{root}/\1'", path.read_text("utf-8")), "utf-8")
        elif path.name != "__pycache__":
            (ours / path.name).symlink_to(path)
    for path in (source / "bin").iterdir():
        with path.open("rb") as file:
            is_script = file.read(2) == b"#!"
        if path.is_symlink() or not is_script:
            (target / "bin" / path.name).symlink_to(path.resolve() if path.name.startswith("python") else path)
        else:
            shutil.copy2(path, target / "bin" / path.name)
            text = path.read_bytes().replace(os.fsencode(source), os.fsencode(target), 1)
            (target / "bin" / path.name).write_bytes(text)
    for name in ("pyvenv.cfg", "share"):
        if (source / name).exists():
            (target / name).symlink_to(source / name)


@contextlib.contextmanager
def planted(root: Path, fault: Fault) -> Generator[None]:
    """Plant a fault in a copy for the time of the block. The fault must be one that can be planted there."""
    path = root / fault.file
    text = path.read_text("utf-8")
    path.write_text(text.replace(fault.old, fault.new), "utf-8")
    _forget_compiled(path)
    try:
        yield
    finally:
        path.write_text(text, "utf-8")
        _forget_compiled(path)


def _forget_compiled(path: Path) -> None:
    """Remove the byte code: Python knows by the second and the size whether it is current, and both may be equal."""
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()


def run_tests(root: Path, tests: Sequence[str], marks: str, options: Sequence[str] = ()) -> Outcome:
    """Run the tests with these marks, in one process and with their files in memory.

    A run that does not come to an end has failed; then a text in parentheses stands for a test.
    """
    if "grid:" not in (root / "pyproject.toml").read_text("utf-8"):
        marks = marks.replace(" and not grid", "")  # pytest rejects unknown marks
    command = [str(root / ".venv" / "bin" / "python"), "-m", "pytest", "-q", "-rfE", "-p", "no:cacheprovider"]
    command += ["-m", marks, "-k", "not storm", "-o", f"timeout={TEST_LIMIT_S}", *options, *tests]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TMPDIR": str(root.parent), "COLUMNS": "1000"}
    before = _children_cpu_s()
    process = subprocess.Popen(
        command, cwd=root, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        output = process.communicate(timeout=LIMIT_S)[0].decode(errors="replace")
        failed = _find_failed(process.returncode, output)
    except subprocess.TimeoutExpired:
        failed = (f"(the tests did not end within {LIMIT_S:g} s)",)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return Outcome(failed, _children_cpu_s() - before)


def _find_failed(status: int, output: str) -> tuple[str, ...]:
    if status in (0, 5):  # 5: no test has these marks
        return ()
    if status == 4:
        raise RuntimeError(f"pytest does not accept its arguments: {output.strip()[-1000:]}")
    found = tuple(_FAILED.findall(output))
    return found or (f"(pytest ended with {status}: {output.strip()[-300:]})",)


def _children_cpu_s() -> float:
    times = os.times()
    return times.children_user + times.children_system


def find_tests(root: Path, tests: Sequence[str]) -> list[str]:
    """Return those of the tests that a checkout has: an earlier one may lack some."""
    return [test for test in tests if (root / test.partition("::")[0]).exists()]
