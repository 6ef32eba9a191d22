"""What the owner of a client's data has beside the decisions: a page in the browser, and a report."""

from __future__ import annotations

import datetime
import os
import webbrowser
from collections.abc import Callable
from typing import TYPE_CHECKING, Unpack

import click
import msgspec

from fedplat import extras
from fedplat.errors import FedplatError, MissingExtraError
from fedplat_client import activity_report, log
from fedplat_client.client_opening import find_client
from fedplat_client.command_options import APPROVAL_OPTIONS, ApprovalOptions, add_options
from fedplat_client.options import ClientOptions
from fedplat_client.trainer_options import UsageError

if TYPE_CHECKING:
    from fedplat_client._page.steward import Steward
    from fedplat_client.client import Client

DEFAULT_LISTEN = "127.0.0.1:7490"


@click.command(
    help="Show in a browser what waits for the owner's approval, what was decided, what has left the client, the "
    "policy, and a report. Jobs are approved, rejected and revoked there, too. Works while the client runs. The "
    "printed address signs in once, within 60 seconds; Enter prints a new one, Ctrl-C ends the page."
)
@add_options(APPROVAL_OPTIONS)
@click.option(
    "--listen", default=DEFAULT_LISTEN, show_default=True, metavar="HOST:PORT", help="Loopback address of the page."
)
@click.option("--no-browser", is_flag=True, help="Print the address only.")
def page(listen: str, no_browser: bool, **options: Unpack[ApprovalOptions]) -> None:
    """Serve the page of the owner."""
    client = _find(options)
    try:
        steward = _open_steward(client)
        _serve(steward, listen, None if no_browser else webbrowser.open)
    except FedplatError as exc:
        raise click.ClickException(log.make_printable(str(exc))) from exc


def _open_steward(client: Client) -> Steward:
    from fedplat_client._page.steward import Steward

    return Steward(client.site, client.open_owner_files(), client.decide, client.fetch_offers)


def _serve(steward: Steward, listen: str, open_browser: Callable[[str], object] | None) -> None:
    try:
        from fedplat.web import serving
        from fedplat.web.sessions import CodeLogin, LoginCodes
        from fedplat_client._page.app import StewardApp
    except ModuleNotFoundError as exc:
        if (exc.name or "").partition(".")[0] not in ("starlette", "jinja2", "uvicorn", "h11"):
            raise
        command = extras.install_command("pages", "fedplat-client")
        raise MissingExtraError(f"the page needs {exc.name}; install it with: {command}") from exc

    def create(codes: LoginCodes, hosts: frozenset[str], port: int) -> StewardApp:
        return StewardApp(CodeLogin(steward, codes), hosts, port)

    serving.serve_locally(create, serving.LocalPageOptions(listen, _announce, open_browser))


def _announce(address: str) -> None:
    click.echo(address)
    click.echo(
        "The address is valid once, for 60 seconds. For a new one press Enter, or use: "
        f"kill -USR1 {os.getpid()}. Ctrl-C ends the page.",
        err=True,
    )


@click.command(
    help="Print a report of what has left the client in a period, as Markdown: the record of a processor with the "
    "fields of Art. 30 (2) GDPR. People fill in the fields that the client cannot know. Works while the "
    "client runs."
)
@add_options(APPROVAL_OPTIONS)
@click.option("--from", "since", metavar="YYYY-MM-DD", help="First day, in UTC; default: the first of January.")
@click.option("--to", "until", metavar="YYYY-MM-DD", help="Last day, in UTC; default: today.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def report(since: str | None, until: str | None, as_json: bool, **options: Unpack[ApprovalOptions]) -> None:
    """Print a report."""
    now = datetime.datetime.now(datetime.UTC)
    first = _parse_day("--from", since, now.date().replace(month=1, day=1))
    last = _parse_day("--to", until, now.date())
    if last < first:
        raise UsageError(f"--to {last} is before --from {first}; expected the same day or a later one")
    client = _find(options)
    try:
        jobs = _open_steward(client).report_jobs()
        found = activity_report.build_report(client.site, first, last, jobs, now)
    except FedplatError as exc:
        raise click.ClickException(log.make_printable(str(exc))) from exc
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as exc:
        text = f"the record {client.released} cannot be read: {exc}; move the file aside"
        raise click.ClickException(log.make_printable(text)) from exc
    if as_json:
        click.echo(msgspec.json.encode(found))
    else:
        click.echo(activity_report.write_markdown(found), nl=False)


def _parse_day(option: str, text: str | None, default: datetime.date) -> datetime.date:
    try:
        return activity_report.parse_day(text) if text is not None else default
    except ValueError as exc:
        raise UsageError(f"{option} {exc}") from exc


def _find(options: ApprovalOptions) -> Client:
    return find_client(options, ClientOptions(require_approval=True, policy=options["policy"]))


COMMANDS = (page, report)
