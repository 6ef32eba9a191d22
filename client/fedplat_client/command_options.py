"""The options that the commands of `fedplat-client` have in common: which client it is, and how it works."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias, TypedDict

import click

from fedplat import texts
from fedplat.command_line.with_click import config_option
from fedplat.secure_aggregation.messages import MAX_GROUP, MIN_GROUP
from fedplat_client import transport
from fedplat_client.options import ClientOptions

Decorator: TypeAlias = Callable[[Callable[..., None]], Callable[..., None]]
_LEVELS = ("debug", "info", "warning", "error")
_DEFAULTS = ClientOptions()


def _parse_size(text: str) -> int:
    try:
        return texts.parse_size(text)
    except ValueError as exc:
        raise click.BadParameter(str(exc)) from exc


class IdentityOptions(TypedDict):
    """The values of `IDENTITY_OPTIONS`."""

    ticket: str | None
    ticket_file: Path | None
    server: str | None
    population: str | None
    data_dir: Path | None


class ApprovalOptions(IdentityOptions):
    """The values of `APPROVAL_OPTIONS`."""

    policy: Path | None


class ClientCommandOptions(ApprovalOptions):
    """The values of `RUN_OPTIONS`."""

    plugins: tuple[str, ...]
    labels: tuple[str, ...]
    transport: str
    proxy: str
    ca: Path | None
    mtls: bool
    require_secure_aggregation: bool
    require_local_noise: bool
    min_local_noise_multiplier: float
    require_confirmation: bool
    min_secure_clients: int
    min_secure_threshold: float
    trusted_clients: Path | None
    require_approval: bool
    exchange_models: bool
    max_share: float
    peer_listen: str
    peer_address: str
    cache_limit: int
    log_level: str
    json_log: bool


_option = functools.partial(click.option, show_envvar=True)
_flag = functools.partial(_option, is_flag=True)
IDENTITY_OPTIONS = (
    config_option,
    click.option(
        "--ticket",
        metavar="TICKET",
        help="Enrollment ticket from the operator. Prefer --ticket-file: all users of the host can see arguments.",
    ),
    click.option(
        "--ticket-file",
        type=click.Path(path_type=Path, dir_okay=False),
        help="File with the ticket. An enrolled client needs no ticket.",
    ),
    _option(
        "--server",
        envvar="FEDPLAT_SERVER",
        metavar="HOST:PORT",
        help="Server to use, if the data directory has identities for several.",
    ),
    _option(
        "--population",
        envvar="FEDPLAT_POPULATION",
        help="Population to use, if the data directory has identities for several.",
    ),
    _option(
        "--data-dir",
        type=click.Path(path_type=Path, file_okay=False),
        envvar="FEDPLAT_CLIENT_DATA_DIR",
        help="Directory for identity and models.",
    ),
)
"""The options of each command: which client it is."""

_POLICY = _option(
    "--policy",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    envvar="FEDPLAT_POLICY",
    help="File (TOML) with the jobs that may run without being approved one by one; implies --require-approval. "
    "Default: policy.toml in the client's folder of the data directory, if it is there.",
)
APPROVAL_OPTIONS = (*IDENTITY_OPTIONS, _POLICY)
"""The options of each command that shows or decides what may run."""
RUN_OPTIONS = (
    *IDENTITY_OPTIONS,
    click.option(
        "--plugin",
        "plugins",
        multiple=True,
        metavar="KIND.NAME=REF",
        help="Add a plugin that jobs may name, as module:class or file.py:class; KIND.NAME alone for one of an "
        "installed package. KIND is codecs or algorithms; repeatable.",
    ),
    click.option("--label", "labels", multiple=True, metavar="KEY=VALUE", help="Add a label; repeatable."),
    _option(
        "--transport",
        type=click.Choice(transport.TRANSPORTS),
        default=transport.AUTO,
        envvar="FEDPLAT_TRANSPORT",
        show_default=True,
        help="How to reach the server: gRPC, HTTP/1.1 (the server's --http-listen), or auto: gRPC, and HTTP/1.1 in "
        "networks that let no gRPC through.",
    ),
    _option(
        "--proxy",
        default="",
        envvar="FEDPLAT_PROXY",
        metavar="URL|none",
        help="Proxy for the connection to the server, such as http://proxy.example:3128; default: that of the "
        "environment (https_proxy, no_proxy). Keep a password in the variable: all users of the host see arguments.",
    ),
    _option(
        "--ca",
        type=click.Path(path_type=Path, dir_okay=False),
        envvar="FEDPLAT_CA",
        help="File with certificates (PEM) of further authorities to trust, such as that of a proxy that inspects TLS.",
    ),
    _flag(
        "--mtls",
        envvar="FEDPLAT_MTLS",
        help="Authenticate with a client certificate, on the server's mTLS port, instead of signing each call.",
    ),
    _flag(
        "--require-secure-aggregation",
        envvar="FEDPLAT_REQUIRE_SECURE_AGGREGATION",
        help="Refuse to train without secure aggregation, so that the server never sees an update of this client.",
    ),
    _flag(
        "--require-local-noise",
        envvar="FEDPLAT_REQUIRE_LOCAL_NOISE",
        help='Refuse to train unless the client adds noise to its update itself: [privacy] trust = "none".',
    ),
    click.option(
        "--min-local-noise-multiplier",
        type=click.FloatRange(min=0.0),
        default=0.0,
        help="Smallest noise multiplier of a sum, from the noise that clients add to their updates; above 0 it implies "
        "--require-local-noise.",
    ),
    _flag(
        "--require-confirmation",
        envvar="FEDPLAT_REQUIRE_CONFIRMATION",
        help="Refuse secure aggregations in which clients do not confirm the survivors to each other: "
        "[secure_aggregation] confirm = true.",
    ),
    click.option(
        "--min-secure-clients",
        type=click.IntRange(MIN_GROUP, MAX_GROUP),
        default=MIN_GROUP,
        show_default=True,
        help="Smallest number of clients in a sum of secure aggregation.",
    ),
    click.option(
        "--min-secure-threshold",
        type=click.FloatRange(0.5, 1.0),
        default=0.5,
        show_default=True,
        help="Smallest threshold of secure aggregation: the part of the clients that have to collude with the server "
        "to read an update.",
    ),
    click.option(
        "--trusted-clients",
        type=click.Path(path_type=Path, dir_okay=False),
        help="File with the public keys of the clients that may take part in a secure aggregation with this one, or "
        "exchange models with it, one in each line as the command identity shows it; default: any client.",
    ),
    _flag(
        "--require-approval",
        envvar="FEDPLAT_REQUIRE_APPROVAL",
        help="Run only jobs that were approved with the command approve, or by a policy.",
    ),
    _POLICY,
    _flag(
        "--exchange-models",
        envvar="FEDPLAT_EXCHANGE_MODELS",
        help="Take part in decentralised jobs, in which other clients see the model that this client has trained. By "
        "default a client refuses such jobs.",
    ),
    _option(
        "--max-share",
        type=click.FloatRange(0.0, 1.0, min_open=True),
        default=ClientOptions.max_share,
        envvar="FEDPLAT_MAX_SHARE",
        show_default=True,
        metavar="PART",
        help='Refuse rings of decentralised jobs (exchange = "ring") in which one model is more than this part of the '
        "mean, which would show it to all others.",
    ),
    _option(
        "--peer-listen",
        default="",
        envvar="FEDPLAT_PEER_LISTEN",
        metavar="HOST:PORT",
        help="Open a port, on which the neighbours of this client in decentralised jobs fetch its models; implies "
        "--exchange-models. By default a client opens no port, and its models pass through the server, encrypted.",
    ),
    _option(
        "--peer-address",
        default="",
        envvar="FEDPLAT_PEER_ADDRESS",
        metavar="HOST:PORT",
        help="Address at which neighbours reach the port of --peer-listen; default: the same.",
    ),
    _option(
        "--cache-limit",
        type=_parse_size,
        metavar="SIZE",
        default=f"{_DEFAULTS.cache_limit_bytes // 2**30}GiB",
        envvar="FEDPLAT_CACHE_LIMIT",
        show_default=True,
        help="Largest size of the cache of models, such as 500MB. On a disk with less space the cache gives way by "
        "itself. The codecs' residuals, the client states and the models of decentralised jobs may each take the same "
        "size again.",
    ),
    click.option("--log-level", type=click.Choice(_LEVELS), default="info", show_default=True),
    click.option("--json-log/--text-log", default=False, help="Log format: lines of JSON, or text, the default."),
)
"""The options of each command that runs a client."""


def add_options(options: Sequence[Decorator]) -> Decorator:
    """Return a decorator that adds options to a command, in their order."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate
