"""The job file: the definition of a training job in TOML, validated as a whole before anything starts.

Every section is one frozen record with its own checks (`sections.py`); unknown keys are errors. `spec.py` is the whole
job, with the checks of tables against each other, and warnings about settings that are allowed but seldom useful;
`privacy.py` and `secure.py` build the objects that a job runs with. `parse_job` reports each mistake with its key,
its value and the expected values, and suggests similar names.
"""

from __future__ import annotations

from fedplat.job.privacy import (
    build_mechanism,
    build_rule,
    build_secure_rule,
    calibrate,
    charges,
    find_mechanism,
    find_mechanism_of,
    plan_charge,
)
from fedplat.job.sections import (
    Adaptive,
    Approval,
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
from fedplat.job.spec import (
    JobSpec,
    canonical_text,
    check_algorithm,
    check_main,
    digest_job,
    digest_text,
    is_unreadable,
    job_file,
    parse_job,
    read_newer,
    warnings,
)
from fedplat.job.tables import PoolOptions, ServerLearning, ServerStep, WarmStart

__all__ = [
    "Adaptive",
    "Approval",
    "ClientEvaluation",
    "Compression",
    "Count",
    "Deadlines",
    "Duration",
    "Evaluation",
    "JobSpec",
    "Model",
    "Name",
    "PoolOptions",
    "Positive",
    "Retention",
    "Retry",
    "Scalar",
    "Selection",
    "ServerLearning",
    "ServerStep",
    "Updates",
    "WarmStart",
    "build_mechanism",
    "build_rule",
    "build_secure_rule",
    "calibrate",
    "canonical_text",
    "charges",
    "check_algorithm",
    "check_main",
    "digest_job",
    "digest_text",
    "find_mechanism",
    "find_mechanism_of",
    "is_unreadable",
    "job_file",
    "parse_job",
    "plan_charge",
    "read_newer",
    "warnings",
]
