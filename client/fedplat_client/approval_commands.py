"""The commands with which the owner of a client's data decides which jobs run: review, approve, reject, revoke."""

from __future__ import annotations

import contextlib
import datetime
import re
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import click
import msgspec

from fedplat.errors import FedplatError
from fedplat_client import errors, log
from fedplat_client._consent import decisions as typed
from fedplat_client._state.approvals import Decision, Verdict
from fedplat_client.client import Client
from fedplat_client.client_opening import find_client
from fedplat_client.command_options import APPROVAL_OPTIONS, ApprovalOptions, add_options
from fedplat_client.options import ClientOptions
from fedplat_client.trainer_options import UsageError

if TYPE_CHECKING:
    from fedplat_client._consent.owner import OwnerFiles, Standing
    from fedplat_client._consent.terms import OfferedJob

_HEX = re.compile("[0-9a-f]{8,64}")
_SHOWN = 16
"""The first digits of a digest that a list shows."""
_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
_DIGEST = click.argument("digest")


class _Decided(TypedDict):
    """What a command prints of a decision."""

    digest: str
    verdict: Verdict


@click.command(
    help="Show the jobs that the server offers, or one of them: what leaves this client, how often, who sees it, under "
    "which guarantee, what may go wrong, and what the policy says. DIGEST is that of fedplat job check, or its first "
    "8 digits or more. Asks the server, unless the client runs, which asks it by itself."
)
@click.argument("digest", required=False)
@add_options(APPROVAL_OPTIONS)
@click.option("--file", "shows_file", is_flag=True, help="Print the job file that the digest is made of.")
@click.option("--offline", is_flag=True, help="Show what the client has, without asking the server.")
@_JSON
def review(
    digest: str | None, shows_file: bool, offline: bool, as_json: bool, **options: Unpack[ApprovalOptions]
) -> None:
    """Show offered jobs."""
    client = _find(options)
    if not offline:
        _fetch(client)
    with _sentences():
        files = client.open_owner_files()
        if digest is None:
            _show_jobs(files, as_json=as_json)
            return
        found = _resolve(files, digest)
        job = files.read(found)
        if job is None:
            raise click.ClickException(f"this client does not have the job {found}; its server has not offered it")
        if shows_file:
            click.echo(job.offer.job_file, nl=False)
        elif as_json:
            click.echo(msgspec.json.encode(_describe_job(files, job)))
        else:
            _print_job(files, job)


@click.command(help="List the decisions of the owner: approvals with their limits, rejections and revocations.")
@add_options(APPROVAL_OPTIONS)
@_JSON
def approvals(as_json: bool, **options: Unpack[ApprovalOptions]) -> None:
    """List decisions."""
    with _sentences():
        decisions = _find(options).open_owner_files().approvals.load()
    if as_json:
        click.echo(msgspec.json.encode(decisions))
        return
    for digest, decision in decisions.jobs.items():
        limits = "".join(f", {each}" for each in typed.list_limits(decision))
        reason = f": {log.make_printable(decision.reason)}" if decision.reason else ""
        click.echo(f"{digest[:_SHOWN]}  {decision.at[:19]}  {decision.verdict}{limits}{reason}")
    if not decisions.jobs:
        click.echo("no decisions yet; the command review shows what the server offers")


@click.command(
    help="Let this client take part in a job. DIGEST is that of fedplat job check; the first 8 digits or more are "
    "enough for a job that the server has offered. A client that runs with --require-approval reads it before its next "
    "check-in; another one runs only approved jobs from its next start on."
)
@_DIGEST
@add_options(APPROVAL_OPTIONS)
@click.option("--max-rounds", type=click.IntRange(1), metavar="N", help="At most so many rounds; default: the job's.")
@click.option("--until", metavar="YYYY-MM-DD", help="Last day on which the client takes part; default: no end.")
@click.option(
    "--max-epsilon",
    type=click.FloatRange(0.0, min_open=True),
    metavar="EPSILON",
    help="Only if the job states an epsilon of at most this.",
)
@_JSON
def approve(
    digest: str,
    max_rounds: int | None,
    until: str | None,
    max_epsilon: float | None,
    as_json: bool,
    **options: Unpack[ApprovalOptions],
) -> None:
    """Approve a job."""
    if until is not None:
        _check("--until", lambda: typed.check_day(until, datetime.date.today()))

    def make(at: str) -> Decision:
        return Decision("approved", at, max_rounds=max_rounds, until=until, max_epsilon=max_epsilon)

    _decide(options, digest, as_json, make)


@click.command(help="Keep this client out of a job, also if a policy would allow it; its operator sees the reason.")
@_DIGEST
@add_options(APPROVAL_OPTIONS)
@click.option("--reason", required=True, metavar="TEXT", help="Why, for the operator of the job.")
@_JSON
def reject(digest: str, reason: str, as_json: bool, **options: Unpack[ApprovalOptions]) -> None:
    """Reject a job."""
    _check("--reason:", lambda: typed.check_reason(reason))
    _decide(options, digest, as_json, lambda at: Decision("rejected", at, reason=reason))


@click.command(
    help="Take an approval back, also in the middle of a round: what is not yet being sent stays here. A later "
    "approval replaces it."
)
@_DIGEST
@add_options(APPROVAL_OPTIONS)
@click.option("--reason", default="", metavar="TEXT", help="Why, for the operator of the job.")
@_JSON
def revoke(digest: str, reason: str, as_json: bool, **options: Unpack[ApprovalOptions]) -> None:
    """Revoke an approval."""
    _check("--reason:", lambda: typed.check_reason(reason))
    _decide(options, digest, as_json, lambda at: Decision("revoked", at, reason=reason))


COMMANDS = (review, approvals, approve, reject, revoke)


def _find(options: ApprovalOptions) -> Client:
    return find_client(options, ClientOptions(require_approval=True, policy=options["policy"]))


@contextlib.contextmanager
def _sentences() -> Generator[None]:
    """Turn the errors of the client into a sentence."""
    try:
        yield
    except (FedplatError, ValueError) as exc:
        raise click.ClickException(log.make_printable(str(exc))) from exc


def _fetch(client: Client) -> None:
    """Get the offers of the server; without an answer, what the client has counts."""
    try:
        client.fetch_offers()
    except errors.DataDirectoryInUseError:
        return  # the running client gets them
    except FedplatError as exc:
        click.echo(log.make_printable(f"The server cannot be asked, this is what the client has: {exc}"), err=True)


def _resolve(files: OwnerFiles, text: str) -> str:
    """Return the digest that begins with a text. Raises `UsageError`."""
    if not _HEX.fullmatch(text):
        raise UsageError(f"{text[:80]!r} is no digest; expected 64 hexadecimal digits in lower case, or the first 8")
    if len(text) == 64:
        return text
    known = {*files.offers.list(), *files.approvals.load().jobs}
    found = sorted(each for each in known if each.startswith(text))
    if len(found) != 1:
        problem = f"{len(found)} jobs begin" if found else "no job that this client knows begins"
        raise UsageError(f"{problem} with {text}; expected all 64 digits of the digest, or more of them")
    return found[0]


def _decide(options: ApprovalOptions, text: str, as_json: bool, make: Callable[[str], Decision]) -> None:
    client = _find(options)
    with _sentences():
        files = client.open_owner_files()
        digest = _resolve(files, text)
        decision = make(typed.now())
        client.decide(digest, decision)
        job = files.read(digest)
    if as_json:
        click.echo(msgspec.json.encode(_Decided(digest=digest, verdict=decision.verdict)))
        return
    name = "a job that its server has not offered yet" if job is None else log.make_printable(job.spec.name)
    click.echo(f"{decision.verdict}: {name} ({digest[:_SHOWN]})")


def _check(option: str, check: Callable[[], None]) -> None:
    """Check the value of an option. Raises `UsageError`."""
    try:
        check()
    except ValueError as exc:
        raise UsageError(f"{option} {exc}") from exc


def _stand(files: OwnerFiles, job: OfferedJob) -> Standing:
    return files.judge(job, files.approvals.load().jobs.get(job.digest))[0]


_WORDS = {"allow": "runs", "refuse": "refused", "ask": "waits"}


def _show_jobs(files: OwnerFiles, *, as_json: bool) -> None:
    jobs = [job for digest in files.offers.list() if (job := files.read(digest)) is not None]
    if as_json:
        click.echo(msgspec.json.encode([_describe_job(files, job) for job in jobs]))
        return
    for job in jobs:
        standing, by = _stand(files, job), f" by {job.offer.submitter}" if job.offer.submitter else ""
        text = f"{job.digest[:_SHOWN]}  {_WORDS[standing.verdict]:<7}  {job.spec.name}{by}: {standing.reason}"
        click.echo(log.make_printable(text))
    if not jobs:
        click.echo("the server offers no job, or has not been asked yet")


def _describe_job(files: OwnerFiles, job: OfferedJob) -> dict[str, Any]:
    from fedplat.job import terms

    standing, found = files.judge(job, files.approvals.load().jobs.get(job.digest))
    return {
        "digest": job.digest,
        "job_id": job.offer.job_id,
        "name": job.spec.name,
        "submitter": job.offer.submitter,
        "verdict": standing.verdict,
        "reason": standing.reason,
        "disclosures": {each.title: each.texts for each in terms.describe(job.spec)},
        "config": job.spec.client_config,
        "policy": [{"rule": each.rule, "contrary": each.contrary} for each in (found.findings if found else ())],
        "job_file": job.offer.job_file,
    }


def _print_job(files: OwnerFiles, job: OfferedJob) -> None:
    facts = _describe_job(files, job)
    rows = [("job", f"{facts['name']} ({facts['job_id']})"), ("digest", job.digest)]
    rows += [("submitted by", facts["submitter"] or "unknown")]
    rows += [("here", f"{_WORDS[facts['verdict']]}: {facts['reason']}")]
    for title, texts in facts["disclosures"].items():
        rows += [(title if not number else "", text) for number, text in enumerate(texts)]
    settings = ", ".join(f"{key} = {value!r}" for key, value in facts["config"].items())
    rows += [("[config]", settings or "empty")]
    for finding in facts["policy"]:
        rows += [(finding["rule"], "; ".join(finding["contrary"]) or "applies")]
    width = max(len(title) for title, _ in rows)
    for title, text in rows:
        click.echo(log.make_printable(f"{title:<{width}}  {text}"))
