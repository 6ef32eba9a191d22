"""Job files of a newer release: as much of them as this one can read, so that it can show such a job, but not run it.

While the daemons of a server are replaced one by one, an older one may take over and find a job that needs the newer
release. It pauses that job with the reason, and runs the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import structs

from fedplat.config.plugins import Plugins, name_of
from fedplat.config.toml import read_record, read_toml, readable_part
from fedplat.errors import JobFileError
from fedplat.job.spec import JobSpec
from fedplat.privacy import Privacy

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
    raw = read_toml(job_file)
    if ("privacy" in raw) != (privacy is not None):
        raise JobFileError("privacy: the job file and the stored [privacy] do not agree")
    readable = readable_part({key: value for key, value in raw.items() if key != "privacy"}, JobSpec)
    spec = read_record({**_PLACEHOLDERS, **readable, "aggregation": {"rule": _UNREADABLE}}, JobSpec, plugins=_ABSENT)
    return spec if privacy is None else structs.replace(spec, privacy=_read_privacy(privacy))


def is_unreadable(spec: JobSpec) -> bool:
    """Return whether a job was read by `read_newer`."""
    return name_of(spec.aggregation) == _UNREADABLE


def _read_privacy(stored: Mapping[str, Any]) -> Privacy:
    """Return options that withhold what the stored ones withhold; their promise is not known."""
    try:
        return read_record({**_PRIVACY, **readable_part(stored, Privacy)}, Privacy)
    except JobFileError:  # each key is valid, but not all together
        return read_record(_PRIVACY, Privacy)
