"""The job file: what a training job is, in TOML, validated as a whole before anything starts.

Every section is one frozen record with its own rules (`sections.py`); unknown keys are errors. What one table asks of
the others is in `checks.py`, and, of private jobs, in `private.py`; what a job may well be, but should not,
is in `advice.py`. `parse_job` names each mistake by its key, its
value and what was expected, and suggests names that are near.
"""

from __future__ import annotations

from fedplat.job.advice import warnings
from fedplat.job.pool import Pool, ServerLearning, ServerStep, WarmStart
from fedplat.job.sections import (
    Adaptive,
    ClientEvaluation,
    Compression,
    Count,
    Deadlines,
    Duration,
    Evaluation,
    Model,
    Name,
    Positive,
    Retention,
    Retry,
    Scalar,
    Selection,
    Updates,
)
from fedplat.job.spec import JobSpec, parse_job

__all__ = [
    "Adaptive",
    "ClientEvaluation",
    "Compression",
    "Count",
    "Deadlines",
    "Duration",
    "Evaluation",
    "JobSpec",
    "Model",
    "Name",
    "Pool",
    "Positive",
    "Retention",
    "Retry",
    "Scalar",
    "Selection",
    "ServerLearning",
    "ServerStep",
    "Updates",
    "WarmStart",
    "parse_job",
    "warnings",
]
