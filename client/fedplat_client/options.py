"""The options of a client besides its server and population."""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from fedplat import texts, wire
from fedplat.secure_aggregation.messages import KEY_BYTES, MAX_GROUP, MIN_GROUP
from fedplat.wire import auth, proxies
from fedplat_client import transport
from fedplat_client.cancellation import StopSignal
from fedplat_client.errors import DataDirectoryError

if TYPE_CHECKING:
    from fedplat.secure_aggregation.participant import ParticipantLimits

_ALL_ADDRESSES = ("0.0.0.0", "[::]")


@dataclass(frozen=True, kw_only=True)
class ClientOptions:
    """Times in seconds, sizes in bytes.

    The options of secure aggregation are the limits of the client's owner: the client refuses assignments beyond them
    before it trains (`UNSAFE_AGGREGATION`), whatever the server and the job say.

    `rng`, `wait` and `clock` are the client's randomness and time; tests replace them. `wait(signal, seconds)` waits
    until the signal is set, at most `seconds`, and returns whether it is set.
    """

    check_in_wait_s: float = 60.0
    """How long a check-in waits at the server for an assignment, and a step of secure aggregation or of a decentralised
    job for the next one."""
    call_timeout_s: float = 30.0
    """How long the server may take to answer."""
    first_backoff_s: float = wire.FIRST_BACKOFF_S
    max_backoff_s: float = wire.MAX_BACKOFF_S
    transfer_attempts: int = 8
    """How many times in a row a transfer may break without a single new byte."""
    inline_limit_bytes: int = wire.INLINE_BYTES
    """Largest update that is sent within its report, without a separate upload."""
    cache_limit_bytes: int = 2 * 2**30
    """Largest size of the model cache, which also gives way when its disk is full; a larger model is used but not kept.
    The codecs' residuals may take the same size again, and so may the client states, and the models of decentralised
    jobs besides the current one."""
    max_model_bytes: int = 32 * 2**30
    """Largest model that is accepted; a larger one fails the assignment (`TRANSFER_FAILED`)."""
    transport: str = transport.AUTO
    """`"grpc"`; `"http"` for HTTP/1.1, in networks that let no gRPC through; or `"auto"`: gRPC, and HTTP/1.1 where
    the server answers over HTTP/1.1 only."""
    proxy: str = ""
    """`http://HOST:PORT` of a proxy for the connection to the server, with `USER:PASSWORD@` before the host if need be,
    or `"none"`; by default the proxy of the environment (`https_proxy`, `no_proxy`)."""
    ca: str | os.PathLike[str] | None = None
    """File with the certificates (PEM) of further authorities to trust, such as that of a proxy that inspects TLS."""
    mtls: bool = False
    """Authenticate with a short-lived certificate instead of signing each call."""
    require_secure_aggregation: bool = False
    """Refuse to train without secure aggregation, so that the server never receives an update that it can read."""
    require_local_noise: bool = False
    """Refuse to train unless the client itself adds noise to its update: `[privacy] trust = "none"`."""
    min_local_noise_multiplier: float = 0.0
    """Smallest noise multiplier of a sum with the fewest clients that the job allows: the deviation of the noise that
    they add together, over what one client can change. Above 0, it implies `require_local_noise`."""
    require_confirmation: bool = False
    """Refuse jobs without `confirm` in `[secure_aggregation]`, in which the server could tell clients different
    survivors."""
    min_secure_clients: int = MIN_GROUP
    """Smallest number of updates in a sum of secure aggregation, 3 to 1,000."""
    min_secure_threshold: float = 0.5
    """Smallest `threshold` of `[secure_aggregation]`, 0.5 to 1: the part of the clients with shares of this client's
    secrets that have to collude with the server to read its update."""
    trusted_clients: Collection[str] | os.PathLike[str] | None = None
    """Public keys of the clients that may take part in a secure aggregation with this one, and exchange models with it,
    as `fedplat-client identity` shows them, or a file with one in each line; otherwise the server could add clients of
    its own. None: any client."""
    require_approval: bool = False
    """Run only jobs that the owner of the data has approved, by their digests, with `fedplat-client approve`. The
    client derives what it does from the approved job file, and refuses assignments that differ (`NOT_APPROVED`)."""
    policy: str | os.PathLike[str] | None = None
    """File with the owner's policy (TOML): which jobs may run without being asked about. Implies `require_approval`, as
    do files `policy.toml` and `approvals.json` in the data directory."""
    exchange_models: bool = False
    """Take part in decentralised jobs, in which other clients see this client's whole model (their neighbours in each
    round, or with `exchange = "ring"` only the mean of all). Without it the client refuses such jobs
    (`UNSAFE_AGGREGATION`), and so does one that requires secure aggregation or local noise."""
    max_share: float = 0.5  # `MAX_SHARE` of fedplat.gossip.stated, which only silos load
    """Largest part of a mean that one model may be, in decentralised jobs with `exchange = "ring"`: a mean that is
    nearly one silo's model shows it to all others. The client refuses other rings, and so does any client a ring in
    which one model is more than three quarters of what two of the silos have not contributed themselves."""
    peer_listen: str = ""
    """`host:port` of a port of this client for its neighbours in decentralised jobs; by default it opens none,
    and what it sends them passes through the server, encrypted. Implies `exchange_models`."""
    peer_address: str = ""
    """`host:port` at which neighbours reach that port; by default `peer_listen`."""
    leaves_tasks: bool = False
    """Leave tasks that go on without this process, such as jobs of Slurm, instead of waiting for them; the next process
    of this client reports them. Such a client takes no part in secure aggregations, which need it to be there."""
    rng: random.Random = field(default_factory=random.SystemRandom)
    wait: Callable[[StopSignal, float], bool] = StopSignal.wait
    clock: Callable[[], float] = time.monotonic

    _trusted_keys: frozenset[bytes] | None = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        for name in ("check_in_wait_s", "call_timeout_s", "first_backoff_s", "max_backoff_s"):
            value: float = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} is {value}; expected a positive number of seconds")
        if not 0 <= self.inline_limit_bytes <= wire.INLINE_BYTES:
            raise ValueError(
                f"inline_limit_bytes is {self.inline_limit_bytes}; expected at least 0 and at most {wire.INLINE_BYTES}"
            )
        for name, least in (("transfer_attempts", 1), ("cache_limit_bytes", 0), ("max_model_bytes", 0)):
            number: int = getattr(self, name)
            if number < least:
                raise ValueError(f"{name} is {number}; expected at least {least}")
        self._check_transport()
        self._check_secure_limits()
        if self.trusted_clients is not None:
            keys = _parse_keys(_read_lines(self.trusted_clients))
            if len(keys) + 1 < self.min_secure_clients:
                raise ValueError(
                    f"trusted_clients has {len(keys)} public keys; expected at least "
                    f"{self.min_secure_clients - 1} besides the client's own, because of min_secure_clients"
                )
            object.__setattr__(self, "_trusted_keys", keys)

        _check_listener(self.peer_listen, self.peer_address)

    @property
    def takes_exchanges(self) -> bool:
        """True if the client takes part in decentralised jobs."""
        refuses = self.require_secure_aggregation or self.requires_noise
        return (self.exchange_models or bool(self.peer_listen)) and not refuses

    @property
    def transports(self) -> tuple[str, ...]:
        """The transports that the client may use."""
        if self.mtls or self.peer_listen:
            return (transport.GRPC,)
        return (transport.GRPC, transport.HTTP) if self.transport == transport.AUTO else (self.transport,)

    @property
    def trusted_keys(self) -> frozenset[bytes] | None:
        """The public keys of the clients that the owner trusts; None: those of any client."""
        return self._trusted_keys

    def _check_transport(self) -> None:
        if self.transport not in transport.TRANSPORTS:
            raise ValueError(f"transport is {self.transport!r}; expected 'auto', 'grpc' or 'http'")
        if self.transport == transport.HTTP and (self.mtls or self.peer_listen):
            name = "mtls" if self.mtls else "peer_listen"
            raise ValueError(f"{name} needs gRPC, whose connections have certificates; use it without transport 'http'")
        proxy = urlsplit(self.proxy) if self.proxy not in ("", proxies.NONE) else None
        if proxy is not None and (proxy.scheme != "http" or not proxy.hostname or proxy.path not in ("", "/")):
            shown = self.proxy.rpartition("@")[2]
            raise ValueError(f"proxy is {shown[:100]!r}; expected a URL such as 'http://proxy.example:3128', or 'none'")

    def read_authorities(self) -> str:
        """Return the certificates of `ca`, PEM; empty without the option. Raises `DataDirectoryError`."""
        if self.ca is None:
            return ""
        try:
            text = Path(self.ca).read_text(encoding="ascii")
        except (OSError, UnicodeDecodeError) as exc:
            raise DataDirectoryError(f"the file of authorities {os.fspath(self.ca)} cannot be read: {exc}") from exc
        if "-----BEGIN CERTIFICATE-----" not in text:
            raise DataDirectoryError(
                f"the file of authorities {os.fspath(self.ca)} has no certificate in PEM; expected "
                "-----BEGIN CERTIFICATE-----"
            )
        return text

    def _check_secure_limits(self) -> None:
        if not MIN_GROUP <= self.min_secure_clients <= MAX_GROUP:
            raise ValueError(
                f"min_secure_clients is {self.min_secure_clients}; expected at least {MIN_GROUP} and "
                f"at most {MAX_GROUP}"
            )
        if not 0.5 <= self.min_secure_threshold <= 1.0:
            raise ValueError(
                f"min_secure_threshold is {self.min_secure_threshold}; expected at least 0.5 and at most 1"
            )
        if not (math.isfinite(self.min_local_noise_multiplier) and self.min_local_noise_multiplier >= 0.0):
            raise ValueError(
                f"min_local_noise_multiplier is {self.min_local_noise_multiplier}; expected a number of at least 0"
            )
        if self.leaves_tasks and (self.require_secure_aggregation or self.requires_noise or self.takes_exchanges):
            raise ValueError(
                "leaves_tasks (--detach) is set, but secure aggregation and decentralised jobs need the client to be "
                "there all the time; set one of them"
            )
        if not 0.0 < self.max_share <= 1.0:
            raise ValueError(f"max_share is {self.max_share}; expected a number above 0 and at most 1")

    @property
    def requires_noise(self) -> bool:
        """True if the client trains only with noise that it adds to its update itself."""
        return self.require_local_noise or self.min_local_noise_multiplier > 0.0

    def secure_limits(self, own_key: bytes) -> ParticipantLimits:
        """Return the owner's limits for secure aggregations; `own_key` is the client's public key."""
        from fedplat.secure_aggregation.participant import ParticipantLimits

        trusted = None if self._trusted_keys is None else self._trusted_keys | {own_key}
        return ParticipantLimits(self.min_secure_clients, self.min_secure_threshold, trusted, self.require_confirmation)


def check_text(what: str, text: str) -> str:
    """Return a text that the server gets. Raises `ValueError` for bytes of another encoding than UTF-8."""
    if (shown := texts.repair(text)) != text:
        raise ValueError(f"{what} '{shown}' is not valid UTF-8; write it in UTF-8")
    return text


def validate_labels(labels: Mapping[str, str]) -> dict[str, str]:
    """Return labels that the server gets. Raises `ValueError`."""
    for key, value in labels.items():
        if not key or type(key) is not str or type(value) is not str:
            raise ValueError(f"the label {key!r} is {value!r}; expected text for both, such as {{'memory_mb': '4096'}}")
        check_text("the label", f"{key}={value}")
    return dict(labels)


def _check_listener(listen: str, address: str) -> None:
    for name, value in (("peer_listen", listen), ("peer_address", address)):
        if value and not auth.is_address(value):
            raise ValueError(f"{name} is {value[:100]!r}; expected host:port, such as 0.0.0.0:7445")
    if address and not listen:
        raise ValueError("peer_address is set, but peer_listen is not; set both, or neither to open no port")
    if listen.rpartition(":")[0] in _ALL_ADDRESSES and not address:
        raise ValueError(
            f"peer_listen is {listen!r}, all addresses of this host; set peer_address to the host:port at which other "
            "clients reach it"
        )


def _read_lines(trusted: Collection[str] | os.PathLike[str]) -> Iterable[str]:
    if isinstance(trusted, str):
        raise ValueError("trusted_clients is text; expected a set of public keys, or a Path of a file with them")
    if not isinstance(trusted, os.PathLike):
        return trusted
    try:
        return Path(trusted).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        raise ValueError(f"trusted_clients: {os.fspath(trusted)} cannot be read: {exc}") from exc


def _parse_keys(lines: Iterable[str]) -> frozenset[bytes]:
    """Parse public keys, one in each line; a comment begins with #."""
    keys: set[bytes] = set()
    for line in lines:
        text = line.partition("#")[0].strip()
        try:
            key = bytes.fromhex(text)
        except ValueError:
            key = b""
        if text and len(key) != KEY_BYTES:
            raise ValueError(
                f"trusted_clients has {text[:100]!r}; expected a public key of {2 * KEY_BYTES} hexadecimal digits, "
                "as fedplat-client identity shows it"
            )
        if key:
            keys.add(key)
    return frozenset(keys)
