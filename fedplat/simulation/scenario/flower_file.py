"""The file `fedplat.toml` next to a Flower app's `pyproject.toml`: a simulation file without what the app decides.

The file is optional, and so is every key. It has tables of a job (`[selection]`, `[deadlines]`, `[retry]`, ...) and of
its simulation (`[simulation]`, `[simulation.fleet]`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, cast

import numpy as np

from fedplat.config.toml import read_toml, shown_key
from fedplat.config.toml_text import write_toml
from fedplat.errors import JobFileError
from fedplat.flower.app import FlowerApp
from fedplat.job.checks import NO_PRIVACY
from fedplat.model import Parameters
from fedplat.simulation.scenario import file as files
from fedplat.simulation.scenario.file import TABLE, SimulationFile

FILE = "fedplat.toml"
INITIAL = "flower.safetensors"
"""The `model.initial` of such a job, which no one reads: its first version comes from the app."""
MAX_ROUNDS = 1_000_000
"""The app itself decides when the job is complete."""
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "selection": {"over_selection": 1.0, "min_fraction": 1e-9},
    "deadlines": {"selection_s": 3600.0, "training_s": 3600.0},
    "retry": {"max_attempts": 3},
}
"""Values that differ from those of other jobs: every client that the app draws is waited for, as by Flower."""
SERVER_DEFAULTS = {**DEFAULTS, "deadlines": {"selection_s": 60.0, "training_s": 3600.0}}
"""The same on a server, where a client that does not return within a minute counts as lost, as in Flower."""
_OF_APP = {
    "model": "",
    "rounds": "",
    "trainer": "",
    "config": "; set values in pyproject.toml, or with --run-config",
    "selection.goal": "",
    "flower.app": "",
    "flower.run_config": "; set values in pyproject.toml, or with --run-config",
    "simulation.data": "",
    "simulation.partition": "",
    "simulation.model": "",
    "simulation.held_out": "",
    "simulation.training": "",
    "simulation.model_bytes": "",
    "simulation.target": "",
    "simulation.target_metric": "",
    "simulation.engine": "; --workers 1 runs all clients in one process",
}
"""Keys of a simulation file that the app itself decides about, and what to do instead."""


def read(
    app: FlowerApp,
    *,
    num_clients: int = 0,
    seed: int | None = None,
    workers: int | None = None,
    population: str | None = None,
    on_server: bool = False,
) -> SimulationFile:
    """Return the job and the environment of an app: its `fedplat.toml`, if there is one, with changes.

    The number of clients is `num_clients`, or that of the file, or that of the app. A job `on_server` needs a
    `population`, here or in the file, and waits for its clients for a minute only. Raises `JobFileError` with a line
    for each mistake.
    """
    path = app.folder / FILE
    try:
        raw = read_toml(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raw = {}
    except (OSError, UnicodeDecodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc)
        raise JobFileError(f"{path} cannot be read: {reason}") from exc
    except JobFileError as exc:
        raise JobFileError(_name_file(path, exc)) from exc
    mistakes = [_refuse(key, hint) for key, hint in _OF_APP.items() if _has(raw, key)]
    if mistakes := [*mistakes, *([NO_PRIVACY] if "privacy" in raw else [])]:
        raise JobFileError("\n".join(f"{path}: {line}" for line in mistakes))
    if population is not None:
        raw["population"] = population
    if on_server and "population" not in raw:
        raise JobFileError(f"there is no population of clients; expected --population NAME, or the key in {path}")
    _complete(raw, app, SERVER_DEFAULTS if on_server else DEFAULTS)
    simulation, fleet = raw.setdefault(TABLE, {}), {}
    if isinstance(simulation, dict):
        table = cast(dict[str, Any], simulation)
        table |= {key: value for key, value in (("seed", seed), ("workers", workers)) if value is not None}
        fleet = table.setdefault("fleet", {})
    if isinstance(fleet, dict):
        given = cast(dict[str, Any], fleet)
        given["num_clients"] = num_clients or given.get("num_clients") or app.num_clients
    try:
        return files.parse(write_toml(raw), app.folder)
    except JobFileError as exc:
        raise JobFileError(_name_file(path, exc)) from exc


def make_initial() -> Parameters:
    """Return the model that is uploaded with such a job, since each job has one."""
    return Parameters.from_arrays({"unused": np.zeros(1, np.float32)})


def _complete(raw: dict[str, Any], app: FlowerApp, defaults: Mapping[str, Mapping[str, Any]]) -> None:
    """Add the keys that a job needs, in place; the checks of the file find any other value."""
    name = re.sub(r"[^\w.-]+", "-", app.name, flags=re.ASCII).strip("._-")[:63] or "app"
    needed: dict[str, Any] = {"name": name, "population": "simulation", "trainer": name, "rounds": MAX_ROUNDS}
    for key, value in needed.items():
        raw.setdefault(key, value)
    tables = {
        **defaults,
        "model": {"initial": INITIAL},
        "flower": {"app": name, **({"run_config": dict(app.run_config)} if app.run_config else {})},
    }
    for key, values in tables.items():
        table = raw.setdefault(key, {})
        if isinstance(table, dict):
            raw[key] = {**values, **cast(dict[str, Any], table)}
    if isinstance(raw["selection"], dict):
        raw["selection"]["goal"] = 1  # the app draws the clients


def _has(raw: Mapping[str, Any], key: str) -> bool:
    first, _, rest = key.partition(".")
    table = raw.get(first)
    return rest in table if rest and isinstance(table, Mapping) else not rest and first in raw


def _refuse(key: str, hint: str) -> str:
    return f"{'.'.join(map(shown_key, key.split('.')))}: the Flower app decides about it; expected no such key{hint}"


def _name_file(path: Any, exc: JobFileError) -> str:
    return "\n".join(f"{path}: {line}" for line in str(exc).splitlines())
