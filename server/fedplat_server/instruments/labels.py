"""Bounded label values: each value is a time series in Prometheus, so there may be only so many of them."""

from __future__ import annotations

from google.protobuf import descriptor_pool

MAX_JOBS = 100
MAX_POPULATIONS = 50
OTHER = "other"
"""The label of all values beyond the limit."""


class JobLabels:
    """The label values of open jobs: the first `max_jobs` have their own, the others share `other`.

    A job keeps its labels until it is removed, so its counters never move to other labels.
    """

    def __init__(self, max_jobs: int = MAX_JOBS) -> None:
        self._max_jobs = max_jobs
        self._own: dict[str, tuple[str, str]] = {}
        self._others: set[str] = set()

    def add(self, job_id: str, name: str) -> None:
        """Give a job labels, unless it has some."""
        if job_id not in self._own and job_id not in self._others:
            if len(self._own) < self._max_jobs:
                self._own[job_id] = (job_id, name)
            else:
                self._others.add(job_id)

    def remove(self, job_id: str) -> None:
        """Make room for another job."""
        self._own.pop(job_id, None)
        self._others.discard(job_id)

    def has_own(self, job_id: str) -> bool:
        """Return whether a job has labels of its own."""
        return job_id in self._own

    def of(self, job_id: str) -> tuple[str, str]:
        """Return the values of `job_id` and `job_name` for a job."""
        return self._own.get(job_id, (OTHER, OTHER))


class PopulationLabels:
    """The label values of populations: the first `max_populations` have their own, the others share `other`.

    Numbers of clients of a hidden population are not counted, because they would reveal the secret sample of a private
    job. A population stays hidden until the daemon ends.
    """

    def __init__(self, max_populations: int = MAX_POPULATIONS) -> None:
        self._max_populations = max_populations
        self._own: set[str] = set()
        self._hidden: set[str] = set()

    def hide(self, population: str) -> None:
        """Hide a population, which has a job whose sample is secret."""
        self._hidden.add(population)

    def is_hidden(self, population: str) -> bool:
        """Return whether a population is hidden."""
        return population in self._hidden

    def of(self, population: str) -> str:
        """Return the value of `population` for a population."""
        if population not in self._own:
            if len(self._own) >= self._max_populations:
                return OTHER
            self._own.add(population)
        return population


def method_label(method: str) -> str:
    """Return the value of `grpc_method` for `/service/name`: without the slash; `other` for unknown methods (A66)."""
    service, _, name = method.removeprefix("/").partition("/")
    try:
        methods = descriptor_pool.Default().FindServiceByName(service).methods_by_name
    except KeyError:
        return OTHER
    return f"{service}/{name}" if name in methods else OTHER
