"""The simulation file: a job file with a table `[simulation]`, which describes the environment of the job.

An operator submits the same file that was simulated: `job_text` removes the table, so that no server ever receives it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import tomllib
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from fedplat.config import toml
from fedplat.config.plugin_objects import plugins_in
from fedplat.config.plugins import BUILTIN, Plugins
from fedplat.config.toml import format_value, read_record, read_toml, to_table
from fedplat.config.toml_text import set_key, split_key, write_toml
from fedplat.errors import JobFileError
from fedplat.job import JobSpec, check_algorithm, check_main, job_file
from fedplat.simulation.scenario.options import SimulationOptions

TABLE = "simulation"
_EXAMPLES = Path(__file__).resolve().parent / "examples"
EXAMPLES = frozenset(path.stem for path in _EXAMPLES.glob("*.toml"))
"""The names of the simulation files that are part of the package."""
_HEADER = re.compile(r"\s*\[\[?\s*([\w-]+|\"[^\"]*\"|'[^']*')")


@dataclasses.dataclass(frozen=True)
class SimulationFile:
    """A job and its environment. Paths and modules are relative to `folder`; `raw` is the parsed TOML.

    `plugins` are the names that the file may use besides the built-in ones.
    """

    job: JobSpec
    simulation: SimulationOptions
    folder: Path
    raw: Mapping[str, Any]
    plugins: Plugins = BUILTIN

    def to_toml(self) -> str:
        """Return the text of the file. Raises `JobFileError` if no file can name one of its classes or functions."""
        text = write_toml(self.raw)
        try:
            read = parse(text, self.folder)
        except JobFileError as exc:
            raise JobFileError(f"{exc}; a file names only built-in classes, and those of files and modules") from exc
        check_main(read.job.model.initial)
        return text

    def job_text(self) -> str:
        """Return the text of the job file, for a server. Raises `JobFileError` for a job that a server cannot run."""
        return job_file(self.job)


def read(path: Path, changes: Sequence[str] = ()) -> SimulationFile:
    """Read a simulation file and apply changes, which are `key=value` texts.

    A name of `EXAMPLES` stands for that example, if there is no such file. Raises `JobFileError`, with the name of the
    file in each line.
    """
    if str(path) in EXAMPLES and not path.exists():
        path = _EXAMPLES / f"{path}.toml"
    elif path.suffix != ".toml" and not path.exists():
        raise JobFileError(
            f"{path}: there is no such file; expected a simulation file, such as job.toml, or the name of an example "
            f"of the package: {', '.join(sorted(EXAMPLES))}"
        )
    with naming(path):
        return parse(read_text(path), path.absolute().parent, changes)


@contextlib.contextmanager
def naming(path: Path) -> Generator[None]:
    """Put the name of the file before each line of an error."""
    try:
        yield
    except JobFileError as exc:
        raise JobFileError("\n".join(f"{path}: {line}" for line in str(exc).splitlines())) from exc


def read_text(path: Path) -> str:
    """Read the text of a file. Raises `JobFileError`, without its name."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc)
        raise JobFileError(f"the file cannot be read: {reason}") from exc


def parse(
    text: str, folder: Path, changes: Sequence[str] = (), absent: frozenset[tuple[str, str]] = frozenset()
) -> SimulationFile:
    """Parse the text of a simulation file. Raises `JobFileError` with a line for each table that has a mistake.

    It may name plugins of installed packages, and of modules and files relative to `folder`; and for a job that is only
    submitted, the `absent` plugins of the server, by kind and name.
    """
    raw = read_toml(text)
    for change in changes:
        _change(raw, change)
    return _read(raw, folder, Plugins(installed=True, folder=folder, absent=absent))


def of_records(job: JobSpec, simulation: SimulationOptions, folder: Path | None = None) -> SimulationFile:
    """Return the simulation file that has these records, after the same checks; `raw` are the equivalent tables.

    Plugins are named by their class. Paths are relative to `folder`, by default the working directory. Raises
    `JobFileError` with a line for each mistake.
    """
    raw = {**to_table(job), TABLE: to_table(simulation)}
    folder = folder or Path.cwd()
    return _read(raw, folder, dataclasses.replace(plugins_in([job, simulation]), installed=True, folder=folder))


def _read(raw: Mapping[str, Any], folder: Path, plugins: Plugins) -> SimulationFile:
    job = {key: value for key, value in raw.items() if key != TABLE}
    mistakes: list[str] = []
    spec, options = None, None
    try:
        spec = read_record(job, JobSpec, plugins=plugins)
        check_algorithm(spec, plugins)
    except JobFileError as exc:
        mistakes.append(str(exc))
    table = raw.get(TABLE, {})
    try:
        if not isinstance(table, dict):
            raise JobFileError(f"{TABLE} = {format_value(table)}: expected a table, [{TABLE}]")
        options = read_record(cast(dict[str, Any], table), SimulationOptions, f"{TABLE}.", plugins)
    except JobFileError as exc:
        mistakes.append(str(exc))
    if mistakes or spec is None or options is None:
        raise JobFileError("\n".join(mistakes))
    return SimulationFile(spec, options, folder, raw, plugins)


def job_text(text: str) -> str:
    """Remove the table `[simulation]` from a simulation file; the rest of the text, a job file, does not change.

    Raises `JobFileError` if the table has no header of its own, as in `simulation = {...}`.
    """
    raw = read_toml(text)
    if raw.pop(TABLE, None) is None:
        return text
    kept: list[str] = []
    is_job = True
    for line in text.splitlines(keepends=True):
        if header := _HEADER.match(line):
            is_job = header[1].strip("\"'") != TABLE
        if is_job:
            kept.append(line)
    job = "".join(kept)
    try:
        if toml.loads(job) == raw:
            return job
    except tomllib.TOMLDecodeError:
        pass
    # Keys such as `simulation.seed = 1` or `simulation = {...}`, or a text of several lines that looks like a header.
    raise JobFileError(f"{TABLE}: expected a table of its own, [{TABLE}], and tables such as [{TABLE}.data] below it")


def _change(raw: dict[str, Any], change: str) -> None:
    """Set one key, in place; the value is TOML, or plain text if it does not parse as TOML."""
    key, equals, value = change.partition("=")
    try:
        path = split_key(key.strip())
    except tomllib.TOMLDecodeError:
        path = []
    if not equals or not path:
        raise JobFileError(f"{change!r}: expected KEY=VALUE, such as selection.goal=20 or simulation.seed=1")
    try:
        new = toml.loads(f"value = {value.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        new = value.strip()
    try:
        set_key(raw, path, new)
    except JobFileError as exc:
        raise JobFileError(f"{change!r}: {exc}") from exc
