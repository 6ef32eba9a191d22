"""`fedplat job list`, `show`, `rounds` and `assignments`."""

from __future__ import annotations

import enum
from typing import Annotated

import typer

from fedplat import errors, texts
from fedplat.admin import descriptions
from fedplat.cli import formats, lists, round_description, watch
from fedplat.cli.formats import SinceOption
from fedplat.cli.lists import LimitOption, Order, WatchOption
from fedplat.cli.options import JsonOption, ServerOption
from fedplat.cli.output import ListColumn, ListLayout
from fedplat.cli.round_description import StateOption
from fedplat.cli.session import FormatOption, JobArgument, complete_clients, session
from fedplat.codecs.container import options_to_text
from fedplat.config import plugins, toml
from fedplat.job import JobSpec
from fedplat.wire.v1 import admin_pb2


class JobStatusChoice(enum.StrEnum):
    """A status of a job without the enum's prefix."""

    DRAFT = "DRAFT"
    RUNNING = "RUNNING"
    PAUSED = "PAUSED"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"


JOB_LAYOUT = ListLayout[admin_pb2.Job](
    lambda job: job.job_id,
    (
        ListColumn("JOB", lambda job: job.job_id),
        ListColumn("NAME", lambda job: job.name),
        ListColumn("POPULATION", lambda job: job.population, is_wide=True),
        ListColumn("STATUS", lambda job: formats.job_status(job.status)),
        ListColumn("#ROUND", lambda job: formats.rounds(job.round, job)),
        ListColumn("#VERSION", lambda job: str(job.model.version), is_wide=True),
        ListColumn("CREATED", lambda job: formats.moment(job.created_unix_s), is_wide=True),
        ListColumn("REASON", lambda job: job.reason),
    ),
)


def round_layout(job: admin_pb2.Job) -> ListLayout[admin_pb2.Round]:
    """Return the layout of a job's attempts."""
    return ListLayout(
        lambda attempt: str(attempt.round),
        (
            ListColumn("#ROUND", lambda attempt: str(attempt.round)),
            ListColumn("#TRY", lambda attempt: str(attempt.attempt)),
            ListColumn("KIND", lambda attempt: formats.attempt_kind(attempt.kind, job), is_wide=True),
            ListColumn("PHASE", lambda attempt: _phase(attempt, job)),
            ListColumn("OPENED", lambda attempt: formats.moment(attempt.opened_unix_s), is_wide=True),
            ListColumn("#CHECKED IN", lambda attempt: str(attempt.checked_in), is_wide=True),
            ListColumn("#ELIGIBLE", lambda attempt: str(attempt.eligible), is_wide=True),
            ListColumn("#ASSIGNED", lambda attempt: str(attempt.assigned)),
            ListColumn("#REPORTED", lambda attempt: str(attempt.reported)),
            ListColumn(
                "#LOST", lambda attempt: str(attempt.late + attempt.failed + attempt.rejected + attempt.dropped)
            ),
            ListColumn("#LATE", lambda attempt: str(attempt.late), is_wide=True),
            ListColumn("#FAILED", lambda attempt: str(attempt.failed), is_wide=True),
            ListColumn("#REJECTED", lambda attempt: str(attempt.rejected), is_wide=True),
            ListColumn("#SURPLUS", lambda attempt: str(attempt.surplus), is_wide=True),
            ListColumn("#DROPPED", lambda attempt: str(attempt.dropped), is_wide=True),
            ListColumn("#MERGED", lambda attempt: str(attempt.merged), is_wide=True),
            ListColumn("#RECEIVED", lambda attempt: watch.format_update_size(attempt), is_wide=True),
            ListColumn("#STALE", lambda attempt: _staleness(attempt), is_wide=True),
            ListColumn("#MAX NORM", lambda attempt: _largest_norm(attempt), is_wide=True),
            ListColumn("#TIME", lambda attempt: watch.format_time(attempt)),
            ListColumn("METRICS", lambda attempt: watch.outcome(attempt)),
        ),
    )


def list_jobs(  # noqa: PLR0913 - a command's parameters are its options
    context: typer.Context,
    status: Annotated[
        list[JobStatusChoice] | None,
        typer.Option("--state", case_sensitive=False, help="Only jobs in this state; repeatable."),
    ] = None,
    population: Annotated[str, typer.Option(metavar="NAME", help="Only jobs of this population.")] = "",
    search: Annotated[str, typer.Option(metavar="TEXT", help="Only jobs whose name or id contains this text.")] = "",
    since: SinceOption = "",
    limit: LimitOption = None,
    watch: WatchOption = None,
    form: FormatOption = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """List jobs, the latest first.

    The order of JSON and of names is that of creation.
    """
    request = admin_pb2.ListJobsRequest(
        statuses=[admin_pb2.JobStatus.Value(f"JOB_STATUS_{one}") for one in status or ()],
        population=population,
        search=search,
        since_unix_s=formats.parse_since(since),
    )
    filtered = bool(status or population or search or since)
    with session(context, server, as_json, form=form) as command:
        query = lists.Query[admin_pb2.Job](
            command.client.page,
            request,
            lambda page: page.jobs,
            "no jobs match" if filtered else "no jobs yet; submit one with: fedplat job submit FILE",
            Order.NEWEST_FIRST,
        )
        lists.show(command, query, JOB_LAYOUT, limit, watch)


def show_job(
    context: typer.Context,
    job: JobArgument,
    form: FormatOption = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show a job."""
    with session(context, server, as_json, form=form) as command:
        found = command.client.show_job(job)
        command.output.show(found, found.job_id, lambda: job_fields(found))


def list_rounds(  # noqa: PLR0913 - a command's parameters are its options
    context: typer.Context,
    job: JobArgument,
    round_: Annotated[
        int | None, typer.Option("--round", metavar="N", min=1, help="Only attempts at this round.")
    ] = None,
    all_attempts: Annotated[bool, typer.Option("--all", help="Include abandoned attempts.")] = False,
    limit: LimitOption = None,
    watch: WatchOption = None,
    form: FormatOption = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """List a job's rounds with participation, duration and metrics, the latest last."""
    request = admin_pb2.ListRoundsRequest(job=job, all_attempts=all_attempts, round=round_ or 0)
    with session(context, server, as_json, form=form) as command:
        query = lists.Query[admin_pb2.Round](
            command.client.page,
            request,
            lambda page: page.rounds,
            f"there is no such attempt at round {round_}" if round_ else "no rounds yet",
            Order.NEWEST_LAST,
        )
        lists.show(command, query, round_layout(command.client.show_job(job)), limit, watch)


def list_assignments(  # noqa: PLR0913 - a command's parameters are its options
    context: typer.Context,
    job: JobArgument,
    round_: Annotated[
        int | None, typer.Option("--round", metavar="N", min=1, help="Only assignments of this round.")
    ] = None,
    attempt: Annotated[int | None, typer.Option(metavar="N", min=1, help="Only those of this attempt.")] = None,
    client: Annotated[
        str, typer.Option(metavar="CLIENT", help="Only assignments of this client.", autocompletion=complete_clients)
    ] = "",
    state: StateOption = None,
    limit: LimitOption = None,
    watch: WatchOption = None,
    form: FormatOption = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the assignments of a job: what each client did, the latest attempt first.

    The names of --output name are those of the clients.
    """
    request = admin_pb2.ListAssignmentsRequest(
        job=job, round=round_ or 0, attempt=attempt or 0, client_id=client, states=round_description.state_names(state)
    )
    filtered = bool(round_ or attempt or client or state)
    with session(context, server, as_json, form=form) as command:
        query = round_description.assignment_query(
            command.client, request, "no assignments match" if filtered else "no assignments yet"
        )
        lists.show(command, query, round_description.OF_JOB, limit, watch)


def _rounds(job: admin_pb2.Job) -> str:
    settling = descriptions.count_settling(job.round, job.num_rounds)
    text = f"{job.round - settling}{f' of {job.num_rounds}' if job.num_rounds else ''} committed"
    return text + (f", and {settling} without training" if settling else "")


def job_fields(job: admin_pb2.Job) -> dict[str, str]:
    """Return the fields of `fedplat job show`."""
    fields = {
        "job": job.job_id,
        "name": job.name,
        "population": job.population,
        "status": formats.job_status(job.status) + (f" ({job.reason})" if job.reason else ""),
        "rounds": _rounds(job),
        "model": _model(job),
        "updates": _encoding(job),
        "created": formats.moment(job.created_unix_s),
    }
    if job.HasField("exchange"):
        fields["exchange"] = descriptions.describe_exchange(job.exchange)
        if job.exchange.num_unreachable:
            fields["unreachable"] = descriptions.join_names(job.exchange.unreachable, job.exchange.num_unreachable)
    if job.HasField("clocks"):
        fields["clocks"] = describe_clocks(job.clocks)
    if job.HasField("approvals"):
        fields["approvals"] = descriptions.describe_approvals(job.approvals)
        fields |= {f"rejected by {each.client_id}": each.text or formats.NOTHING for each in job.approvals.rejected}
        if job.approvals.num_silent:
            fields["undecided"] = descriptions.join_names(job.approvals.silent, job.approvals.num_silent)
    if job.plugins:
        fields["plugins"] = formats.plugins(job.plugins)
    if job.HasField("current"):
        fields["attempt"] = _sentence(job.current)
        if job.current.HasField("progress"):
            fields["progress"] = formats.progress(job.current.progress)
    return fields


def read_spec(job: admin_pb2.Job) -> JobSpec | None:
    """Parse the job file of a job as far as this version of fedplat knows its keys; None if it does not."""
    absent = frozenset((plugin.kind, plugin.name) for plugin in job.plugins)
    try:
        return toml.read_record(toml.read_toml(job.job_file), JobSpec, plugins=plugins.Plugins(absent=absent))
    except errors.JobFileError:  # from a newer server
        return None


def _model(job: admin_pb2.Job) -> str:
    """Describe a job's latest model."""
    model = job.model
    text = f"version {model.version}, {formats.size(model.size_bytes)}, sha256 {model.digest}"
    return text + (f" (restored from version {job.restored_from})" if job.HasField("restored_from") else "")


def _encoding(job: admin_pb2.Job) -> str:
    """Describe the encoding of a job's updates; of the codec of a plugin only the name."""
    spec = read_spec(job)
    if spec is None:
        return formats.NOTHING
    uplink = spec.compression.uplink
    return "not compressed" if uplink is None else f"compressed with {options_to_text(uplink)}"


def _sentence(attempt: admin_pb2.Round) -> str:
    text = (
        f"round {attempt.round} attempt {attempt.attempt} {formats.attempt_phase(attempt.phase).lower()}: "
        f"{attempt.assigned} assigned, {attempt.reported} of {attempt.goal} reported, {attempt.late} late, "
        f"{attempt.failed} failed, {attempt.rejected} rejected"
    )
    if attempt.update_bytes and attempt.reported:
        mean = attempt.update_bytes / attempt.reported
        text += f", {formats.size(attempt.update_bytes)} received ({formats.size(mean)} per update)"
    if attempt.max_staleness:
        text += f", {attempt.mean_staleness:.2g} versions behind on average and {attempt.max_staleness} at most"
    return text + (f" ({attempt.reason})" if attempt.reason else "")


def _phase(attempt: admin_pb2.Round, job: admin_pb2.Job) -> str:
    """Format the phase, and the kind of an attempt that is not for training."""
    phase = formats.attempt_phase(attempt.phase).lower()
    is_training = attempt.kind in (admin_pb2.ATTEMPT_KIND_TRAIN, admin_pb2.ATTEMPT_KIND_UNSPECIFIED)
    return phase if is_training else f"{formats.attempt_kind(attempt.kind, job)} {phase}"


def _staleness(attempt: admin_pb2.Round) -> str:
    """Format the staleness of the updates: the mean, and the maximum."""
    if not attempt.max_staleness:
        return formats.NOTHING
    return f"{attempt.mean_staleness:.2g} (max {attempt.max_staleness})"


def _largest_norm(attempt: admin_pb2.Round) -> str:
    return f"{attempt.largest_norm:.3g}" if attempt.HasField("largest_norm") else formats.NOTHING


def describe_clocks(clocks: admin_pb2.Clocks) -> str:
    """Describe the clocks of the clients of a job: the slowest, the fastest, who waits, and how many rest."""
    text = f"{clocks.minimum} to {clocks.maximum}, of {texts.format_count(clocks.num_members, 'client')}"
    if clocks.num_withheld:
        text += f"; waiting for slower ones: {descriptions.join_names(clocks.withheld, clocks.num_withheld)}"
    if clocks.num_resting:
        text += f"; at rest after they have left: {texts.format_count(clocks.num_resting, 'client')}"
    return text
