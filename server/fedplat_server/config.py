"""The configuration of a daemon: frozen records for its parts."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping
from pathlib import Path

import msgspec

from fedplat import claims, submission_checks
from fedplat.config.loaded_plugins import NO_PLUGINS, LoadedPlugins

DEFAULT_CACHE_BYTES = 8 << 30
"""The limit of the local copies of models that are in an object store."""
DEFAULT_JOB_METRICS = ("loss", "accuracy")
"""The names of the metrics of rounds that the metrics for Prometheus include, unless others are declared."""


@dataclasses.dataclass(frozen=True)
class TlsFiles:
    """PEM files with the certificate chain, its key and, for a private authority, the trusted certificates.

    `renewal` is the command that renews the certificate; "" if the files are the owner's own.
    """

    certificate: Path
    key: Path
    ca: Path | None = None
    renewal: str = "fedplat-server certificates renew"

    @property
    def advice(self) -> str:
        """The advice about a certificate that expires, for a message."""
        return f"renew it with: {self.renewal}" if self.renewal else "replace the files of --tls-certificate, --tls-key"


class Limits(msgspec.Struct, frozen=True):
    """Upper limits on what callers may request; the server enforces them itself.

    `max_calls`: open calls of one client, of which `max_streams` may be uploads and downloads. `max_names`:
    trainers of one client, and as many evaluators, codecs and algorithms. `idle_s`: the longest silence of a stream
    that sends to the server, which must also send `min_bytes_per_s` on average over this time.
    `requests_per_minute`: requests of one client, in one
    burst or evenly. `anonymous_per_minute`: requests of one address (one /64 with IPv6; 8 times as many of a /56,
    32 times as many of a /48) without an enrolled client.
    `challenges_per_minute`: nonces in addition to these, of all addresses together. `max_upload_factor`: the bytes
    that a client may send for one attempt, because transfers broke, in multiples of the largest accepted update.
    `max_label_bytes`: the names and values of a client's labels together, in UTF-8; `max_metric_bytes`: the names of
    the metrics in a report; `max_text`: the reason that a client states, and the reason that its report is refused for.
    `refusal_delay_s`: the delay before an operator's call is refused for its token or its role.
    `operator_requests_per_minute` and `operator_calls`: requests of one operator, and its concurrent calls and watches.
    `notes_per_minute`: audit rows about refused calls and fenced clients, of all callers together.
    `writes_per_minute`: requests of one client that begin a session, each of which is a transaction.
    `newcomer_reads`: concurrent first messages of callers without a credential, of which `newcomer_reads_per_network`
    may be of one network (an IPv4 address, or the /64 of an IPv6 address); others wait for up to `newcomer_read_s`,
    and each must be complete within the same time, or within `newcomer_share_s` if others wait.
    `http_connections`: open connections of the port of HTTP, each of which serves one call at a time. Of those without
    a successful call of an enrolled client or an operator, `http_newcomers` may wait for their callers for longer than
    `http_share_s`, and `http_newcomers_per_network` of one network.
    `open_calls`: concurrent calls of the open services (health, reflection) on one port. `upload_memory_bytes`: the
    memory of all updates that are being received; of the others, `max_waiting_uploads` wait for up to `upload_wait_s`.
    """

    max_waiting: int = 100_000
    max_wait_s: float = 300.0
    max_model_bytes: int = submission_checks.MAX_MODEL_BYTES
    max_labels: int = 64
    max_label_bytes: int = 8192
    max_metrics: int = claims.MetricLimits.num_metrics
    max_metric_bytes: int = claims.MetricLimits.name_bytes
    max_text: int = 1000
    max_names: int = 256
    max_job_file_bytes: int = submission_checks.MAX_JOB_FILE_BYTES
    max_calls: int = 16
    max_streams: int = 4
    idle_s: float = 60.0
    min_bytes_per_s: float = 2048.0
    requests_per_minute: float = 6000.0
    anonymous_per_minute: float = 6000.0
    challenges_per_minute: float = 60_000.0
    max_upload_factor: float = 4.0
    refusal_delay_s: float = 0.5
    operator_requests_per_minute: float = 6000.0
    operator_calls: int = 32
    notes_per_minute: float = 60.0
    writes_per_minute: float = 60.0
    newcomer_reads: int = 128
    newcomer_reads_per_network: int = 32
    newcomer_read_s: float = 5.0
    newcomer_share_s: float = 0.25
    http_connections: int = 4000
    http_newcomers: int = 256
    http_newcomers_per_network: int = 200
    http_share_s: float = 2.0
    open_calls: int = 1024
    open_calls_per_network: int = 64
    upload_memory_bytes: int = 160 * 2**20
    max_waiting_uploads: int = 512
    upload_wait_s: float = 10.0

    @property
    def metrics(self) -> claims.MetricLimits:
        """The limits on the metrics of a report."""
        return claims.MetricLimits(self.max_metrics, self.max_metric_bytes)


class LeaseTimes(msgspec.Struct, frozen=True):
    """The times of the leadership lease of the daemons on one database, in seconds.

    The lease is valid for `valid_s`. Its holder renews it every `renew_s`, and stops leading `margin_s` before its end
    if it could not. The other daemons read it every `poll_s`.
    """

    valid_s: float = 6.0
    renew_s: float = 2.0
    margin_s: float = 1.0
    poll_s: float = 0.5

    @classmethod
    def of(cls, valid_s: float) -> LeaseTimes:
        """Return the times of a lease that is valid for `valid_s`, in the proportions of the default."""
        scale = valid_s / 6.0
        return cls(valid_s, 2.0 * scale, scale, min(0.5, 0.5 * scale))


def is_postgres(database: str) -> bool:
    """Return whether a database is a URL of PostgreSQL, and not the path of a SQLite file."""
    return database.startswith("postgres") and "://" in database


class ServerConfig(msgspec.Struct, frozen=True):
    """The configuration of a daemon.

    `listen` is `host:port` (port 0: any free one). `database` is a URL; `evaluators` and `trainers` map the names that
    jobs use to `module:name` or `/path/to/file.py:name`; one call of an evaluator may last `evaluation_s`.
    `plugins` are those that jobs may name, `flower_apps` the folders of the Flower apps that jobs may name.
    Other daemons of the database reach this one at `advertise` (empty: at `listen`). With `share_port` several daemons
    of one host share `listen`, and each also listens at its own port, that of `advertise`.
    `reflection` enables gRPC server reflection. Without `tls` the server speaks plaintext.
    At `mtls_listen` (`host:port`; empty: disabled) it requires client certificates, which it signs itself.
    `webhook_networks`: the networks that webhooks may reach although their addresses are not public.
    `trusted_proxies`: the networks of proxies whose `x-forwarded-for` header is trusted to name the caller.
    At `dashboard_listen` (`host:port`; empty: disabled) a child process serves the pages for browsers.
    At `http_listen` (`host:port`; empty: disabled) it serves the calls of clients over HTTP/1.1, with the same
    certificates, and with `http_operators` also those of operators; web pages of `http_origins` may call it. Tickets
    have `http_address`, where clients reach it ("": they try the address of gRPC).
    At `health_listen` (`host:port`; empty: disabled) it serves only gRPC's health service, without TLS, for probes.
    A connection that is `connection_age_s` old accepts no new calls; open ones may last twice the longest poll.
    At `metrics_listen` (`host:port`; empty: disabled) it serves metrics for Prometheus, which include those of jobs
    that have a name in `job_metrics`.
    `blobs` is the URL of an object store, or the folder, for models ("": a folder in `data_dir`); at most
    `blob_cache_bytes` of an object store are also in the data folder.
    `spool` is the URL of an object store for copies of updates, or the folder for updates ("": `data_dir`).
    `place` are the options with which another command on this host finds the same data and database, for messages.
    """

    listen: str
    data_dir: Path
    database: str
    evaluators: Mapping[str, str] = {}
    trainers: Mapping[str, str] = {}
    plugins: LoadedPlugins = NO_PLUGINS
    flower_apps: Mapping[str, str] = {}
    evaluation_s: float = 600.0
    limits: Limits = Limits()
    grace_s: float = 10.0
    advertise: str = ""
    share_port: bool = False
    lease: LeaseTimes = LeaseTimes()

    @property
    def is_shared(self) -> bool:
        """True if several daemons may share the database and the data folder: with PostgreSQL, not with SQLite."""
        return is_postgres(self.database)

    @property
    def own_listen(self) -> str:
        """The address where only this daemon listens, with `share_port`."""
        return f"{self.listen.rpartition(':')[0]}:{self.advertise.rpartition(':')[2]}"

    def address(self, port: int) -> str:
        """Return the address where other daemons reach this one, which listens on `port`."""
        return self.advertise or f"{self.listen.rpartition(':')[0]}:{port}"

    reflection: bool = False
    tls: TlsFiles | None = None
    mtls_listen: str = ""
    trusted_proxies: tuple[str, ...] = ()
    webhook_networks: tuple[str, ...] = ()
    connection_age_s: float = 3600.0
    metrics_listen: str = ""
    job_metrics: tuple[str, ...] = DEFAULT_JOB_METRICS
    dashboard_listen: str = ""
    blobs: str = ""
    blob_cache_bytes: int = DEFAULT_CACHE_BYTES
    spool: str = ""
    health_listen: str = ""
    http_listen: str = ""
    http_address: str = ""
    http_origins: tuple[str, ...] = ()
    http_operators: bool = False
    place: str = ""

    @property
    def prune_options(self) -> str:
        """The options with which `fedplat-server prune` finds the data, for a message."""
        return self.place + (f" --blobs {shlex.quote(self.blobs)}" if self.blobs else "")

    @property
    def upload_dir(self) -> Path:
        """The folder of updates, which are kept until their attempt has ended."""
        return (self.data_dir if self.spool_url or not self.spool else Path(self.spool)) / "uploads"

    @property
    def spool_url(self) -> str:
        """The URL of the object store with copies of the updates; empty: the folder is enough."""
        return self.spool if "://" in self.spool else ""
