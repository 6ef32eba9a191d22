"""How a daemon is run: one frozen record for each part that needs to be told something."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import msgspec

from fedplat.claims import MetricLimits


@dataclasses.dataclass(frozen=True)
class TlsFiles:
    """Where the certificate chain, its key and (for a private authority) the trusted certificates lie, as PEM."""

    certificate: Path
    key: Path
    ca: Path | None = None


class Limits(msgspec.Struct, frozen=True):
    """What a caller may ask for at most; the server holds these whatever a client says.

    `max_calls`: open calls of one client, of which `max_streams` may be uploads and downloads. `max_names`: trainers
    and evaluators of one client, each. `idle_s`: how long a stream that sends to the server may say nothing; in this
    time it also has to bring `min_bytes_per_s`. `requests_per_minute`: of one client, all in one burst or evenly.
    `anonymous_per_minute`: of one address (one /64 with IPv6), requests that are not an enrolled client's.
    `challenges_per_minute`: nonces beyond these, of all addresses together. `max_upload_factor`: how often
    a client may send the largest update that is accepted, for one attempt, because transfers broke.
    `max_label_bytes`: of the names and values of a client's labels in UTF-8, all together; `max_metric_bytes`: of the
    names of the metrics in a report; `max_text`: of the reason that a client gives, and of why its report is refused.
    `refusal_delay_s`: how long an operator's call that is refused for its token or its role waits for that.
    `operator_requests_per_minute` and `operator_calls`: requests of one operator, and its calls and watches at once.
    `notes_per_minute`: rows of the audit log about refused calls and fenced clients, of all callers together.
    `writes_per_minute`: requests of one client that begin a session, each of which is a transaction.
    `newcomer_reads`: first messages of callers without a credential that are received at a time, and `_per_network`
    of them (an IPv4 address, or the /64 of an IPv6 address); others wait for up to `newcomer_read_s`, and each must be
    complete after the same time.
    `open_calls`: calls of the open services (health, reflection) at a time. `upload_memory_bytes`: what updates may
    take together while they are received; of those beyond it, `max_waiting_uploads` wait for `upload_wait_s`.
    """

    max_waiting: int = 100_000
    max_wait_s: float = 300.0
    max_model_bytes: int = 64 * 2**30
    max_labels: int = 64
    max_label_bytes: int = 8192
    max_metrics: int = MetricLimits.num_metrics
    max_metric_bytes: int = MetricLimits.name_bytes
    max_text: int = 1000
    max_names: int = 256
    max_job_file_bytes: int = 2**20
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
    open_calls: int = 1024
    open_calls_per_network: int = 64
    upload_memory_bytes: int = 160 * 2**20
    max_waiting_uploads: int = 512
    upload_wait_s: float = 10.0

    @property
    def metrics(self) -> MetricLimits:
        """The bounds on the metrics of a report."""
        return MetricLimits(self.max_metrics, self.max_metric_bytes)


class LeaseTimes(msgspec.Struct, frozen=True):
    """The times of the lease that daemons of one database lead by, in seconds.

    It is `valid_s` long; its holder renews it every `renew_s`, and stops `margin_s` before its end unless it could.
    The others look at it every `poll_s`.
    """

    valid_s: float = 6.0
    renew_s: float = 2.0
    margin_s: float = 1.0
    poll_s: float = 0.5

    @classmethod
    def of(cls, valid_s: float) -> LeaseTimes:
        """The times of a lease of this length, in the proportions of the default."""
        scale = valid_s / 6.0
        return cls(valid_s, 2.0 * scale, scale, min(0.5, 0.5 * scale))


class ServerConfig(msgspec.Struct, frozen=True):
    """Everything that the daemon is told when it starts.

    `listen` is `host:port` (port 0: any free one). `database` is a URL; `evaluators` and `trainers` map the names that
    jobs use to `module:name` or `/path/to/file.py:name`, and one call of an evaluator may take `evaluation_s`.
    Other daemons of the database reach this one at `advertise` (empty: where it listens). With `share_port` several
    daemons of one host listen at `listen` together, and each at a port of its own besides: that of `advertise`.
    `reflection`: whether the server describes its services to whoever asks. Without `tls` it speaks plaintext.
    At `mtls_listen` (`host:port`; empty: nowhere) it asks for client certificates, which it signs itself.
    `trusted_proxies`: the networks of proxies that are believed when they name the caller (`x-forwarded-for`).
    A connection that is `connection_age_s` old takes no more calls; those under way go on for twice the longest poll.
    """

    listen: str
    data_dir: Path
    database: str
    evaluators: Mapping[str, str] = {}
    trainers: Mapping[str, str] = {}
    evaluation_s: float = 600.0
    limits: Limits = Limits()
    grace_s: float = 10.0
    advertise: str = ""
    share_port: bool = False
    lease: LeaseTimes = LeaseTimes()

    @property
    def is_shared(self) -> bool:
        """Whether several daemons may use the database, and the data folder with it: all but SQLite."""
        return self.database.startswith("postgres")

    @property
    def own_listen(self) -> str:
        """Where this daemon alone listens, if it shares its port."""
        return f"{self.listen.rpartition(':')[0]}:{self.advertise.rpartition(':')[2]}"

    def address(self, port: int) -> str:
        """Where other daemons reach this one, which listens on this port."""
        return self.advertise or f"{self.listen.rpartition(':')[0]}:{port}"

    reflection: bool = False
    tls: TlsFiles | None = None
    mtls_listen: str = ""
    trusted_proxies: tuple[str, ...] = ()
    connection_age_s: float = 3600.0

    @property
    def blob_dir(self) -> Path:
        """Where models lie."""
        return self.data_dir / "blobs"

    @property
    def upload_dir(self) -> Path:
        """Where updates lie until their attempt has ended."""
        return self.data_dir / "uploads"
