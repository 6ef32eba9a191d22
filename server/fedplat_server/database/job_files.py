"""Stored job files, with the calibrated `[privacy]` and the plugins of their jobs."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import msgspec
import sqlalchemy

from fedplat.config import decoding, loaded_plugins, toml
from fedplat.config.plugins import BUILTIN, Plugins
from fedplat.errors import FedplatError, JobFileError, PluginError, UserCodeError
from fedplat.job import JobSpec, parse_job, read_newer
from fedplat.privacy import Privacy
from fedplat.rounds.invariants.records import JobRow
from fedplat_server.errors import StoreError

Row = sqlalchemy.Row[Any]


class JobFileReader:
    """Reads stored job files with the plugins of this process; each is parsed once."""

    def __init__(self, plugins: Plugins = BUILTIN) -> None:
        self._plugins = plugins
        self._parse = functools.lru_cache(maxsize=1024)(self._parse_file)

    def read(self, row: Row | JobRow) -> tuple[JobSpec, str]:
        """Return the job of a row of `jobs`, with its calibrated `[privacy]`, and the first mistake in its file.

        If there is a mistake, or this process lacks a plugin of the job, the options of its plugins are `AbsentPlugin`.
        A job file of a newer release is read by `read_newer`. Raises `StoreError` for what is not a job file.
        """
        try:
            return self._read_known(row)
        except (JobFileError, msgspec.ValidationError) as exc:
            problem = str(exc).partition("\n")[0]
        try:
            return read_newer(row.job_file, row.privacy), problem
        except JobFileError as exc:
            raise StoreError(
                f"the stored job file of {row.job_id} cannot be read by this version of fedplat: {exc}"
            ) from exc

    def _read_known(self, row: Row | JobRow) -> tuple[JobSpec, str]:
        plugins = read_plugins(row.plugins)
        spec, problem = self._parse(row.job_file, plugins)
        try:
            return with_calibrated(spec, row.privacy), problem
        except (PluginError, UserCodeError) as exc:  # it builds the job's rule again
            return with_calibrated(_without_plugins(row.job_file, plugins), row.privacy), str(exc)

    def _parse_file(self, job_file: str, plugins: tuple[loaded_plugins.PluginVersion, ...]) -> tuple[JobSpec, str]:
        try:
            return parse_job(job_file, self._plugins), ""
        except FedplatError as exc:  # the code of a plugin may raise any of them
            if not plugins:
                raise
            return _without_plugins(job_file, plugins), str(exc).partition("\n")[0]


def _without_plugins(job_file: str, plugins: Iterable[loaded_plugins.PluginVersion]) -> JobSpec:
    """Parse a stored job file; the options of its plugins are `AbsentPlugin`. Raises `JobFileError`."""
    absent = frozenset((version.kind, version.name) for version in plugins)
    return toml.read_record(toml.read_toml(job_file), JobSpec, plugins=Plugins(absent=absent))


def read_plugins(stored: object) -> tuple[loaded_plugins.PluginVersion, ...]:
    """Return the versions of a job's plugins from their stored form. Raises `msgspec.ValidationError`."""
    return msgspec.convert(stored or (), decoding.prepare_type(tuple[loaded_plugins.PluginVersion, ...]))


def with_calibrated(spec: JobSpec, privacy: object) -> JobSpec:
    """Return a job with its calibrated `[privacy]`, a value of the column `privacy`.

    Raises `JobFileError` or `msgspec.ValidationError` if they do not belong together.
    """
    if (spec.privacy is None) != (privacy is None):
        raise JobFileError("privacy: the job file and the stored [privacy] do not agree")
    if privacy is None:
        return spec
    return msgspec.structs.replace(spec, privacy=msgspec.convert(privacy, decoding.prepare_type(Privacy)))
