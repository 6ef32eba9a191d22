"""Jobs with plugins: a job runs only with the code that it began with, until an operator accepts other code.

The same rules pause a job whose job file another release can read, and this one not (`fedplat/job/spec.py`).

A job keeps the versions of its plugins. Its driver states with the events `ServerRestarted` and `OperatorCommand` which
of them it has. Pure functions.
"""

from __future__ import annotations

from msgspec import structs

from fedplat.config.loaded_plugins import PluginVersion, describe_versions
from fedplat.job import is_unreadable
from fedplat.rounds import closing
from fedplat.rounds.records import JobState
from fedplat.rounds.states import ENDED_JOBS, JobStatus, Reason
from fedplat.rounds.transition import Context, Transition

MAX_PROBLEM = 500
"""Maximum length of the mistakes of a job file in a job's reason."""


def describe_missing(job: JobState, loaded: tuple[PluginVersion, ...], problem: str) -> str:
    """Return why the job cannot run with the loaded plugins; empty if it can, with the same code or with other code.

    `problem` is the first mistake in its job file with these plugins.
    """
    labels = {version.label for version in loaded}
    for version in job.plugins:
        if version.label not in labels:
            return (
                f"the server has no plugin {version.label} (the job has {version.short}); start it with --plugin "
                f"{version.label}=..., then resume the job"
            )
    if problem and is_unreadable(job.spec):
        return (
            f"this server cannot read the job file: {problem[:MAX_PROBLEM]}; another version of fedplat made the job. "
            "If it is newer, update the server, then resume the job; if it is older, cancel the job and submit a "
            "corrected job file, which may start from the model of this job"
        )
    if problem:
        return (
            f"the job cannot use the server's plugins: {problem[:MAX_PROBLEM]}; start the server with "
            f"{describe_versions(job.plugins)}, then resume the job"
        )
    return ""


def describe_changed(job: JobState, loaded: tuple[PluginVersion, ...]) -> str:
    """Return which plugins of the job have other code than before; empty if none has."""
    found = {version.label: version for version in loaded}
    changed = [version for version in job.plugins if found.get(version.label, version) != version]
    if not changed:
        return ""
    now = describe_versions(found[version.label] for version in changed)
    return (
        f"the job has {describe_versions(changed)}, but the server has {now}; start the server with the former plugin, "
        "then resume the job, or resume it now to continue with the other code"
    )


def pause(job: JobState, text: str, context: Context) -> Transition:
    """Pause a job whose plugins are missing or have changed; its open attempt is abandoned, even while it commits."""
    if job.status is JobStatus.DRAFT or job.status in ENDED_JOBS:
        return Transition(job)
    if job.open_attempt is None:
        ended, commands = closing.drop_carried_over(job, Reason.JOB_PAUSED)
    else:
        ended, commands = closing.abandon_all(job, Reason.JOB_PAUSED, text, context)
    if job.status is not JobStatus.PAUSED:
        ended = closing.set_status(ended, JobStatus.PAUSED, text)
    elif job.reason != text:
        ended = structs.replace(ended, reason=text)
    return Transition(ended, commands)
