"""Running the daemon in this process, and `fedplat-server dev`: a server for this machine in one command."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import os
import resource
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple
from urllib.parse import urlsplit

import msgspec
import typer

from fedplat import durable, errors, extras
from fedplat.admin import contexts, profile
from fedplat.extras import install_command
from fedplat.wire import auth, process_tuning
from fedplat_server import config, dashboard_process, logs
from fedplat_server.auth.client_directory import ClientDirectory, Enrollments, Trust, hash_secret
from fedplat_server.auth.pki_folder import LOOPBACK, PkiFolder
from fedplat_server.cli import options
from fedplat_server.cli.init import ADMIN, make_certificates, make_operator, print_made
from fedplat_server.config import ServerConfig
from fedplat_server.daemon import Daemon, stop_on_signals
from fedplat_server.database.records import EnrollmentToken
from fedplat_server.database.store import Store
from fedplat_server.errors import ConfigError
from fedplat_server.messages import validation
from fedplat_server.records import audit
from fedplat_server.rpc.router import PortReservation
from fedplat_server.storage import data_dir as data_folder
from fedplat_server.tracing import ids

if TYPE_CHECKING:
    from fedplat_server.tracing.provider import Tracing


def serve(
    config: ServerConfig,
    log_level: str,
    json_log: bool | None,
    on_started: Callable[[], object] = lambda: None,
    traces: str = "",
) -> None:
    """Run the daemon until SIGTERM or Ctrl-C; call `on_started` when it answers calls.

    `traces` is the URL of the receiver of traces; empty: no traces.
    """
    tracer = open_tracing(traces)
    log = logs.configure(log_level, json=json_log, processors=[ids.add_ids] if tracer is not None else ())
    process_tuning.reuse_message_memory()
    daemon = Daemon(config, count_dropped_lines=lambda: log.num_dropped, tracing=tracer)
    try:
        asyncio.run(_serve(daemon, tracer, on_started))
    finally:
        log.finish(timeout_s=1.0)


async def _serve(daemon: Daemon, tracer: Tracing | None, on_started: Callable[[], object]) -> None:
    raise_open_file_limit()
    process_tuning.keep_what_is_loaded()
    try:
        with stop_on_signals(daemon.stop):
            await _run(daemon, on_started)
    finally:
        if tracer is not None:
            await asyncio.to_thread(tracer.close)
    logs.get().info("the server has stopped")


async def _run(daemon: Daemon, on_started: Callable[[], object]) -> None:
    announcement = asyncio.create_task(_announce(daemon, on_started), name="announcement")
    try:
        await daemon.run()
    finally:
        announcement.cancel()
        await asyncio.wait([announcement])
    if not announcement.cancelled():
        announcement.result()


async def _announce(daemon: Daemon, on_started: Callable[[], object]) -> None:
    await daemon.started.wait()
    on_started()


VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
"""The variables of OpenTelemetry that name the receiver if `--traces` does not."""
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


def open_tracing(url: str, environment: Mapping[str, str] = os.environ) -> Tracing | None:
    """Return the tracing to a receiver; None without a URL, or if OpenTelemetry is disabled by its own variables.

    Raises `ConfigError`. OpenTelemetry is imported only if there is a receiver.
    """
    is_disabled = environment.get("OTEL_SDK_DISABLED", "").lower() == "true"
    if not url or is_disabled or environment.get("OTEL_TRACES_EXPORTER") == "none":
        return None
    _check_url(url)
    for name in _PROTOCOLS:
        if (protocol := environment.get(name, "grpc")) != "grpc":
            raise ConfigError(
                f"{name} is {protocol}; the server sends traces by gRPC only: unset it, or set it to grpc"
            )
    try:
        from fedplat_server.tracing.provider import Tracing
    except ModuleNotFoundError as exc:
        raise ConfigError(
            f"--traces needs the Python package {exc.name}; install it with {install_command('otel')}, or "
            f"leave out --traces (and unset {' and '.join(VARIABLES)})"
        ) from exc
    try:
        return Tracing.open(url)
    except ValueError as exc:  # such as OTEL_EXPORTER_OTLP_TIMEOUT=soon
        raise ConfigError(f"a variable OTEL_... is not valid ({exc}); correct it, or unset it") from exc


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # such as a port that is not a number
        raise ConfigError("--traces: the port is not a number; expected a URL such as http://127.0.0.1:4317") from None
    if parts.username is not None or parts.password is not None:  # the text is not repeated: it has a password
        raise ConfigError("--traces has a user or a password; set OTEL_EXPORTER_OTLP_HEADERS instead")
    if not is_valid or parts.path not in ("", "/") or parts.query:
        raise ConfigError(
            f"--traces {url}: expected the URL of an OTLP/gRPC receiver, such as http://127.0.0.1:4317 or "
            "https://collector.example:4317"
        )


MIN_OPEN_FILES = 8192
"""The daemon warns below this limit, which also includes the files of transfers and of the database."""


def raise_open_file_limit() -> int:
    """Raise the limit of open files to the hard limit and return it; warn if it is below `MIN_OPEN_FILES`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # The default is often 1,024, for programs that use select(); asyncio and gRPC do not. macOS reports an unlimited
    # hard limit, but refuses to set it.
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    if soft != resource.RLIM_INFINITY and soft < MIN_OPEN_FILES:
        logs.get().warning(
            "the limit of open files is low: few clients can connect",
            limit=soft,
            mend=f"raise the hard limit to {MIN_OPEN_FILES}: LimitNOFILE= (systemd), ulimit -Hn, "
            "--ulimit nofile= (docker)",
        )
    return soft


DEFAULT_DASHBOARD = "127.0.0.1:7480"
NUM_TICKET_USES = 1000
TICKET_LIFETIME_S = 30 * 86_400.0
RENEWED_BEFORE_S = 86_400.0
"""A ticket that expires within this time of the start is replaced."""


def dev(  # noqa: PLR0913 -- one parameter for each option of the command line
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Address to listen on, on loopback.")
    ] = options.DEFAULT_LISTEN,
    http_listen: Annotated[
        str,
        typer.Option(metavar="HOST:PORT", help="Address for HTTP/1.1 as well, on loopback. Default: disabled."),
    ] = "",
    data_dir: options.DataDir = options.DEFAULT_DATA_DIR,
    population: Annotated[str, typer.Option(metavar="NAME", help="Population of the ticket's clients.")] = "demo",
    profile_path: Annotated[
        Path | None,
        typer.Option(
            "--profile",
            envvar="FEDPLAT_PROFILE",
            metavar="FILE",
            help="File for the operator's profile, unless it exists. Default: where fedplat looks for it.",
        ),
    ] = None,
    dashboard: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT", help='Address of the dashboard, on loopback; "" for none. Needs the extra "dashboard".'
        ),
    ] = DEFAULT_DASHBOARD,
    log_level: options.LogLevel = "WARNING",
    json_log: options.JsonLog = None,
) -> None:
    """Run a server for development on this machine, with TLS; set it up at the first start.

    Writes the operator's profile, and prints the commands to continue with. Ctrl-C stops the server; the next start
    continues with everything in the data folder.
    """
    served = DevAddresses(listen, http_listen)
    _check(served, population)
    if dashboard:
        options.parse_host(dashboard, "--dashboard")
    with data_folder.lock_data_dir(data_dir.resolve(), shared=False):
        for option, address in served.of_options().items():
            PortReservation(address, option, shared=False).release()
        url = options.database_url(data_dir, None, is_new=True)
        options.protect(data_dir, url)
        folder = PkiFolder.of(data_dir.resolve())
        make_certificates(folder, ["localhost"], url)
        make_operator(data_dir / "admin.toml", url, listen, folder)
        operate = _install_profile(
            "fedplat" if profile_path else _name_command(),
            profile_path or profile.default_path(),
            data_dir.resolve() / "admin.toml",
            url,
            listen,
        )
        ticket = _make_ticket(data_dir.resolve() / f"{population}.ticket", url, served, population, folder)
    print(flush=True)
    with contextlib.ExitStack() as stack:

        def on_started() -> None:
            _print_commands(served, operate, ticket)
            if dashboard:
                stack.enter_context(_dashboard(dashboard, listen, data_dir.resolve() / "admin.toml"))

        serve(make_config(served, data_dir, url), log_level, json_log, on_started)
    print(f"stopped; everything is kept for the next fedplat-server dev{options.repeat_options()}")


class DevAddresses(NamedTuple):
    """Where a server for development listens, for gRPC and for HTTP/1.1 ("": not)."""

    listen: str
    http: str

    def of_options(self) -> dict[str, str]:
        """Return the addresses by the options that set them."""
        return {"--listen": self.listen} | ({"--http-listen": self.http} if self.http else {})


def make_config(served: DevAddresses, data_dir: Path, url: str) -> config.ServerConfig:
    """Return the configuration of a server for development."""
    folder = data_dir.resolve()
    return config.ServerConfig(
        listen=served.listen,
        http_listen=served.http,
        http_address=served.http,
        data_dir=folder,
        database=url,
        tls=PkiFolder.of(folder).files,
        place=options.locate_data(data_dir),
    )


def _check(served: DevAddresses, population: str) -> None:
    for option, address in served.of_options().items():
        host = options.parse_host(address, option)
        if host.strip("[]") not in LOOPBACK:
            raise ConfigError(
                f"{option} {address}: this server listens on loopback only, at 127.0.0.1, [::1] or localhost. For "
                "clients on other machines use fedplat-server init --host NAME, and fedplat-server run"
            )
        if not auth.is_address(address):
            raise ConfigError(
                f"{option} {address}: expected a port from 1 to 65535, because profiles and tickets contain the address"
            )
    if served.http == served.listen:
        raise ConfigError(f"--http-listen {served.http}: that is the address of --listen; expected another port")
    if not validation.is_name(population):
        raise ConfigError(f"--population {population[:80]!r}: expected 1 to 63 letters, digits or _.-")


def _install_profile(command: str, path: Path, admin_path: Path, url: str, address: str) -> str:
    """Write the operator's profile to `path` unless there is one; return the command line that operates this server.

    `command` is the one that uses that profile.
    """
    if not path.exists():
        if not admin_path.exists():
            raise ConfigError(
                f"the profile of the operator {ADMIN} is neither at {path} nor at {admin_path}. Copy it back, or run "
                f"fedplat-server operator remove {ADMIN} --data-dir {shlex.quote(str(admin_path.parent))} and "
                "repeat this command"
            )
        profile.save(msgspec.structs.replace(profile.load(admin_path), server=address), path)
        print_made(True, "profile of fedplat", path)
        return command
    known = _load_known(path, url)
    if known is not None and known.server == address:
        print_made(False, "profile of fedplat", path)
        return command
    if known is not None:
        command += f" --server {address}"
        print(f"kept the profile {path} with the address {known.server}; use this one with: {command}")
        return command
    command = f"fedplat --profile {shlex.quote(str(admin_path))}"
    if profile.load(admin_path).server != address:
        command += f" --server {address}"
    print(f"kept the profile {path}, which is not for this server; use this server with: {command}")
    return command


def _name_command() -> str:
    """Return the command that uses the default profile: `fedplat`, unless another context is in use."""
    name = os.environ.get(contexts.VARIABLE) or contexts.ContextStore.of_user().current
    return "fedplat" if name == contexts.DEFAULT else f"fedplat --context {contexts.DEFAULT}"


def _load_known(path: Path, url: str) -> profile.Profile | None:
    """Return a profile if its token is that of an operator of this server, else None."""
    try:
        found = profile.load(path)
    except errors.ProfileError:
        return None
    operator = options.with_store(url, lambda store: store.operators.find_operator(audit.hash_token(found.token)))
    return found if operator is not None else None


def _make_ticket(path: Path, url: str, served: DevAddresses, population: str, folder: PkiFolder) -> Path:
    """Write an enrollment ticket, unless the file has one that is usable for at least a day."""
    trusted = folder.ca.read_text()

    async def find_or_create(store: Store) -> tuple[EnrollmentToken, auth.Ticket, bool]:
        ticket = _read_ticket(path)
        wanted = (served.listen, served.http, population, trusted)
        if ticket is not None and (ticket.server, ticket.http, ticket.population, ticket.ca) == wanted:
            token = await store.clients.find_enrollment_token(hash_secret(ticket.secret))
            if token is not None and not token.describe_problem(time.time() + RENEWED_BEFORE_S):
                return token, ticket, False
        enrollments = Enrollments(
            store.clients, ClientDirectory(store.clients), lambda: Trust(True, trusted, served.http)
        )
        created = await enrollments.create(population, NUM_TICKET_USES, TICKET_LIFETIME_S, served.listen, audit.HOST)
        return *created, True

    token, ticket, is_new = options.with_store(url, find_or_create)
    if is_new:
        try:
            durable.write_bytes(path, f"{ticket.to_text()}\n".encode())
        except OSError as exc:
            raise ConfigError(f"the ticket {path} cannot be written: {exc.strerror}") from exc
    expiry = datetime.datetime.fromtimestamp(token.expires_unix_s, datetime.UTC)
    print_made(is_new, f"ticket for {token.num_left} clients of {population}, valid until {expiry:%Y-%m-%d}:", path)
    return path


def _read_ticket(path: Path) -> auth.Ticket | None:
    """Return the ticket in a file; None if there is no file, or no ticket in it."""
    try:
        return auth.Ticket.from_text(path.read_text(encoding="ascii", errors="replace"))
    except (OSError, errors.TicketError):
        return None


@contextlib.contextmanager
def _dashboard(address: str, server: str, admin_path: Path) -> Generator[None]:
    """Serve the pages while the block runs: `fedplat dashboard` as a process, which prints the address to open."""
    if missing := dashboard_process.missing_packages():
        print(f"  no dashboard    it needs {', '.join(missing)}: {extras.install_command('dashboard')}", flush=True)
        yield
        return
    # It shares this terminal: Enter prints a new address, and Ctrl-C ends both. The pipe ends it in any other case.
    parent_pipe, ours = os.pipe()
    arguments = ["--profile", str(admin_path), "dashboard", "--listen", address, "--server", server, "--no-browser"]
    arguments += ["--parent-pipe", str(parent_pipe)]
    print("  see the dashboard at this address:", flush=True)
    process = subprocess.Popen([sys.executable, "-P", "-m", "fedplat.cli", *arguments], pass_fds=[parent_pipe])
    os.close(parent_pipe)
    try:
        yield
    finally:
        os.close(ours)
        process.terminate()
        try:
            process.wait(dashboard_process.STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _print_commands(served: DevAddresses, operate: str, ticket: Path) -> None:
    """Print what to do next."""
    client = f"fedplat-client run --ticket-file {shlex.quote(str(ticket))} --data-dir client-1"
    http = f" (HTTP/1.1 at {served.http})" if served.http else ""
    print(f"the server is ready at {served.listen}{http}; Ctrl-C stops it. In another terminal:")
    print(f"  see its status  {operate} status")
    print(f"  run a client    {client} --trainer NAME=FILE.py:FUNCTION")
    print(f"  submit a job    {operate} job submit job.toml --follow", flush=True)
