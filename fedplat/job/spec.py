"""A training job as a whole: its tables, and the checks between them."""

from __future__ import annotations

import math
from collections.abc import Mapping

from fedplat import aggregate
from fedplat.config.plugin_objects import adopt_fields
from fedplat.config.plugins import BUILTIN, Plugins, build_checked, has_absent, name_of
from fedplat.config.toml import (
    format_value,
    normalize,
    read_name,
    read_record,
    read_toml,
    shown_key,
    to_table,
)
from fedplat.config.toml_text import write_toml
from fedplat.errors import JobFileError
from fedplat.job import checks
from fedplat.job.sections import Scalar
from fedplat.job.tables import JobTables


class JobSpec(JobTables, frozen=True, forbid_unknown_fields=True):
    """A training job."""

    def __post_init__(self) -> None:
        adopt_fields(self)
        _check_values(self.config, "config")
        if self.flower is not None:
            _check_values(self.flower.run_config, "flower.run_config")
        checks.check(self)


def parse_job(text: str, plugins: Plugins = BUILTIN) -> JobSpec:
    """Parse a job file, which may use the names of `plugins`. Raises `JobFileError`, with one line per mistake."""
    spec = read_record(read_toml(text), JobSpec, plugins=plugins)
    check_algorithm(spec, plugins)
    return spec


def check_algorithm(spec: JobSpec, plugins: Plugins = BUILTIN) -> None:
    """Raise `JobFileError` unless `config.algorithm` names the algorithm whose class the job's rule requires.

    The class decides, not the name: the class that `plugins` find for the name in `[config]` has to be the required one
    or a subclass of it. So both halves may be named by path, by entry point or by a name that their owner gave them. A
    rule that requires a name is checked with the job's other tables.
    """
    if has_absent(spec) or plugins.absent:
        return  # the server, which has the plugins, checks it
    required = build_checked(spec.aggregation, aggregate.Rule, "aggregation.rule").requirements.algorithm
    if isinstance(required, str):
        return
    key = "config.algorithm"
    given = read_name(spec.config.get("algorithm", "sgd"), aggregate.LOCAL_ALGORITHM, key, plugins)
    if not issubclass(given, required):
        raise JobFileError(
            f'aggregation.rule = "{name_of(spec.aggregation)}": clients must run their part of it; expected [config] '
            f"algorithm = a name of the class {required.__name__} ({required.__module__}), and "
            f'"{given.__struct_config__.tag}" is another'
        )


def job_file(spec: JobSpec) -> str:
    """Return the text of the job file of a job that was made from objects.

    Raises `JobFileError` with one line for each mistake, and for a plugin, because servers have only the built-in
    names.
    """
    text = write_toml(to_table(normalize(spec)))
    check_main(parse_job(text).model.initial)
    return text


def check_main(initial: str) -> None:
    """Raise `JobFileError` if `model.initial` names a function that only the running program has."""
    if initial.startswith("__main__:"):
        raise JobFileError(
            f'model.initial = "{initial}": the function is defined in a notebook or script; expected a function of a '
            "module, module:function, or a .safetensors file"
        )


def _check_values(values: Mapping[str, Scalar], table: str) -> None:
    """Raise `ValueError` for values that cannot be sent to clients."""
    if len(values) > 1000:
        raise ValueError(f"{table} has {len(values)} keys; expected at most 1000")
    for key, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{table}.{shown_key(key)} = {value}: expected a finite number")
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise ValueError(f"{table}.{shown_key(key)} = {format_value(value)}: expected a number of at most 64 bits")
