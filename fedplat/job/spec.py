"""A training job as a whole: its tables, also those of a newer release, warnings, and its initial model's tied weights.

While the daemons of a server are replaced one by one, an older one may take over and find a job that needs the newer
release. It pauses that job with the reason, and runs the others.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, cast

import msgspec
import numpy as np
from msgspec import structs

from fedplat import aggregate, codecs, errors
from fedplat.config import plugin_objects, toml
from fedplat.config.plugins import BUILTIN, Plugins, build_checked, has_absent, name_of
from fedplat.config.toml_text import write_toml
from fedplat.job import checks, sections, tables
from fedplat.job.tables import JobTables
from fedplat.model import FLOATING, Parameters
from fedplat.privacy import Privacy
from fedplat.procedures import PROCEDURE
from fedplat.procedures.contract import version_of
from fedplat.secure_aggregation.setup import hash_parts


class JobSpec(tables.JobTables, frozen=True, forbid_unknown_fields=True):
    """A training job."""

    def __post_init__(self) -> None:
        plugin_objects.adopt_fields(self)
        _check_values(self.config, "config")
        if self.flower is not None:
            _check_values(self.flower.run_config, "flower.run_config")
        checks.check(self)


def parse_job(text: str, plugins: Plugins = BUILTIN) -> JobSpec:
    """Parse a job file, which may use the names of `plugins`. Raises `JobFileError`, with one line per mistake."""
    spec = toml.read_record(toml.read_toml(text), JobSpec, plugins=plugins)
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
    given = toml.read_name(spec.config.get("algorithm", "sgd"), aggregate.LOCAL_ALGORITHM, key, plugins)
    if not issubclass(given, required):
        raise errors.JobFileError(
            f'aggregation.rule = "{name_of(spec.aggregation)}": clients must run their part of it; expected [config] '
            f"algorithm = a name of the class {required.__name__} ({required.__module__}), and "
            f'"{given.__struct_config__.tag}" is another'
        )


def job_file(spec: JobSpec) -> str:
    """Return the text of the job file of a job that was made from objects.

    Raises `JobFileError` with one line for each mistake, and for a plugin, because servers have only the built-in
    names.
    """
    text = write_toml(toml.to_table(toml.normalize(spec)))
    check_main(parse_job(text).model.initial)
    return text


def digest_job(spec: JobSpec, model_digest: str) -> str:
    """Return the SHA-256 by which people and programs name a job, hexadecimal: of its file and its initial model.

    Order, comments, spelling of numbers and keys with their defaults do not change it; everything else does. It needs
    no server, so those who approve a job can compare it with what they were sent. `model_digest` is the SHA-256 of the
    initial model's file, hexadecimal. That of a job with a procedure depends on the version of the procedure, too.
    Raises `JobFileError` as `job_file` does.
    """
    version = None if spec.procedure is None else version_of(spec.procedure)
    return _digest(toml.to_table(toml.normalize(spec)), model_digest, version)


def canonical_text(spec: JobSpec) -> str:
    """Return the job file of a job without comments, and without keys that have their defaults.

    The tables of two jobs with one digest are equal. It may name plugins. Raises `JobFileError` as `job_file` does.
    """
    return write_toml(toml.to_table(toml.normalize(spec)))


def digest_text(text: str, model_digest: str, plugins: Plugins = BUILTIN) -> str:
    """Return the digest of the job of a canonical text, of which this process need not have the plugins.

    Any other text of the job has another digest, and so has another version of its procedure than that of this process.
    Raises `JobFileError` for a text that is not TOML.
    """
    table, version = toml.read_toml(text), None
    if isinstance(options := table.get("procedure"), dict):
        name = cast(dict[str, Any], options).get(PROCEDURE.key)
        record = plugins.find(PROCEDURE, name) if isinstance(name, str) else None
        version = version_of(record) if record is not None else 1
    return _digest(table, model_digest, version)


def _digest(table: Mapping[str, Any], model_digest: str, version: int | None) -> str:
    parts = [msgspec.json.encode(table, order="sorted"), bytes.fromhex(model_digest)]
    return hash_parts(b"fedplat job 1", *parts, *([] if version is None else [b"%d" % version])).hex()


def check_main(initial: str) -> None:
    """Raise `JobFileError` if `model.initial` names a function that only the running program has."""
    if initial.startswith("__main__:"):
        raise errors.JobFileError(
            f'model.initial = "{initial}": the function is defined in a notebook or script; expected a function of a '
            "module, module:function, or a .safetensors file"
        )


def _check_values(values: Mapping[str, sections.Scalar], table: str) -> None:
    """Raise `ValueError` for values that cannot be sent to clients."""
    if len(values) > 1000:
        raise ValueError(f"{table} has {len(values)} keys; expected at most 1000")
    for key, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{table}.{toml.shown_key(key)} = {value}: expected a finite number")
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise ValueError(
                f"{table}.{toml.shown_key(key)} = {toml.format_value(value)}: expected a number of at most 64 bits"
            )


_UNREADABLE = "unreadable"
_ABSENT = Plugins(absent=frozenset([("rules", _UNREADABLE)]))
_PLACEHOLDERS: Mapping[str, Any] = {
    "name": _UNREADABLE,
    "population": _UNREADABLE,
    "trainer": _UNREADABLE,
    "rounds": 1,
    "model": {"initial": f"{_UNREADABLE}.safetensors"},
    "selection": {"goal": 1},
}
_PRIVACY: Mapping[str, Any] = {"delta": 1e-12, "participation": "fixed", "noise_multiplier": 1e-6, "max_releases": 0}


def read_newer(job_file: str, privacy: Mapping[str, Any] | None) -> JobSpec:
    """Return what this release can read of a job file that it cannot read as a whole, with the stored `[privacy]`.

    The rest has its defaults, and the aggregation rule is one that cannot be built: see `is_unreadable`. Raises
    `JobFileError` for a text that is not TOML, and if only one of the two makes the job private.
    """
    raw = toml.read_toml(job_file)
    if ("privacy" in raw) != (privacy is not None):
        raise errors.JobFileError("privacy: the job file and the stored [privacy] do not agree")
    readable = toml.readable_part({key: value for key, value in raw.items() if key != "privacy"}, JobSpec)
    spec = toml.read_record(
        {**_PLACEHOLDERS, **readable, "aggregation": {"rule": _UNREADABLE}}, JobSpec, plugins=_ABSENT
    )
    return spec if privacy is None else structs.replace(spec, privacy=_read_privacy(privacy))


def is_unreadable(spec: JobSpec) -> bool:
    """Return whether a job was read by `read_newer`."""
    return name_of(spec.aggregation) == _UNREADABLE


def _read_privacy(stored: Mapping[str, Any]) -> Privacy:
    """Return options that withhold what the stored ones withhold; their promise is not known."""
    try:
        return toml.read_record({**_PRIVACY, **toml.readable_part(stored, Privacy)}, Privacy)
    except errors.JobFileError:  # each key is valid, but not all together
        return toml.read_record(_PRIVACY, Privacy)


def warnings(spec: JobSpec, model: Parameters | None = None) -> list[str]:
    """Return a warning for each setting that lets one client dominate a job, or does not suit its initial model."""
    found = describe_algorithm(spec)
    if model is not None:
        found += [*describe_coarse_steps(spec, model), *describe_copies(spec, model)]
    updates = spec.updates
    if any(each is not None for each in (spec.flower, spec.secure_aggregation, spec.gossip, spec.procedure)):
        # Its strategy decides what an update may weigh, clients clip and weigh theirs by at most 1, no one sees one, or
        # it is of counts.
        return found
    if not (updates.clips or updates.max_norm or spec.robust is not None):
        found.append(
            "updates: nothing bounds the norm of a single update"
            + (
                f", which may be {spec.outlier_factor:g} times the median of its attempt"
                if spec.outlier_factor
                else ", and updates.outlier_factor = 0 keeps outliers too"
            )
            + "; set updates.clip_norm, updates.adaptive_clip or updates.max_norm, or choose a rule with [robust]"
        )
    if updates.weighting == "examples" and spec.privacy is None and not spec.max_weight_factor:
        found.append(
            "updates.max_weight_factor = 0: a client that claims updates.max_examples = "
            f"{updates.max_examples:g} examples may outweigh all others; set a factor, or a lower max_examples"
        )
    return found


def describe_algorithm(spec: JobSpec) -> list[str]:
    """Return a warning if the options of the local algorithm make it another one."""
    if spec.config.get("algorithm") != "fedprox" or "mu" in spec.config:
        return []
    return [
        'config.mu: missing, so it is 0, and the steps of config.algorithm = "fedprox" are those of "sgd"; set it, '
        "such as mu = 0.01"
    ]


def describe_coarse_steps(spec: JobSpec, model: Parameters) -> list[str]:
    """Return a warning if secure aggregation rounds updates to steps that are larger than the model's own weights.

    A step is the clip norm divided by the number of levels, so a huge norm, meant as "no clipping", leaves little of an
    update. The noise of a private job is larger than a step.
    """
    options = spec.secure_aggregation
    if options is None or spec.privacy is not None:
        return []
    step = spec.updates.clip_norm / (2 ** (options.bits - 1) - 1)
    squares, count = 0.0, 0
    for block in model.to_blocks():
        squares += float(np.square(block, dtype=np.float64).sum())
        count += int(np.count_nonzero(block))
    size = (squares / count) ** 0.5 if count else _USUAL_WEIGHT
    if step <= size:
        return []
    return [
        f"updates.clip_norm = {spec.updates.clip_norm:g}: with secure_aggregation.bits = {options.bits} entries of "
        f"updates are rounded to multiples of {step:.3g}, and the model's weights are about {size:.3g}; set a "
        "clip_norm near the norm of an update, or more bits"
    ]


_USUAL_WEIGHT = 0.1
"""The size of weights, for a model of zeros."""


_ALIKE = codecs.Plain | codecs.Bf16
"""Codecs that decode equal entries to equal ones."""
_MIN_ENTRIES = 64
"""Of matrices that are compared: smaller ones may be equal by chance."""


def describe_copies(spec: JobTables, model: Parameters) -> list[str]:
    """Return a warning if the initial model seems to have a tied weight twice, and the job would change each by itself.

    A file has no notes on tensors that are one in the module. Clients refuse the model as soon as these differ: after
    noise, or a codec that rounds or leaves out entries. Layers that begin as copies of one another are no tied weight:
    their names end alike, but for numbers.
    """
    found = _find_copies(model) if (cause := _cause(spec)) else None
    if found is None:
        return []
    first, other = found
    return [
        f"model.initial: {first!r} and {other!r} have the same values; if they are one tied weight, {cause} makes them "
        f"differ, and clients then refuse the model: leave {other!r} out of it, as fedplat.pytorch.convert."
        "from_state_dict(module.state_dict()) does"
    ]


def _cause(spec: JobTables) -> str:
    """Return what changes equal tensors differently; empty if nothing does."""
    if spec.privacy is not None:
        return "the noise of [privacy]"
    if spec.secure_aggregation is not None:
        return "the rounding of [secure_aggregation]"
    options = (spec.compression.uplink, spec.compression.downlink)
    return "the codec of [compression]" if any(not isinstance(each, _ALIKE | None) for each in options) else ""


def _find_copies(model: Parameters) -> tuple[str, str] | None:
    """Return the names of the first two equal matrices that may be one tied weight."""
    first: dict[tuple[str, tuple[int, ...], bytes], list[str]] = {}
    for tensor in model.schema.tensors:
        if tensor.dtype not in FLOATING or len(tensor.shape) < 2 or tensor.count < _MIN_ENTRIES:
            continue
        values = model[tensor.name]
        bits = np.ascontiguousarray(values.reshape(-1)[:_MIN_ENTRIES]).tobytes()
        for name in first.setdefault((tensor.dtype, tensor.shape, bits), []):
            if _may_be_tied(name, tensor.name) and np.array_equal(model[name], values) and values.min() != values.max():
                return name, tensor.name
        first[tensor.dtype, tensor.shape, bits].append(tensor.name)
    return None


def _may_be_tied(one: str, other: str) -> bool:
    """Return whether names may be those of one tensor: layers.0.linear.weight and layers.1.linear.weight are not."""
    ends = [re.sub(r"[0-9]+", "", ".".join(re.split(r"[./]", name)[-2:])) for name in (one, other)]
    return ends[0] != ends[1] or "embed" in ends[0].casefold()
