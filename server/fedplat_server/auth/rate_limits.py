"""Limits for one caller: requests, concurrent streams, bytes for an attempt, the rate of a stream, audit entries.

A broken or hostile client must cost the others nothing. No code here reads a clock: the time, in seconds, is an
argument, or the result of the function passed to `Quotas`.

Entries beyond the limit are only counted: every append locks the end of the audit chain, which job control needs, too.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter, OrderedDict
from collections.abc import Callable, Generator, Iterator
from typing import NamedTuple

from fedplat import fair_places
from fedplat.rounds import AttemptKey
from fedplat.rounds.commands import RetryWindow
from fedplat_server.config import Limits
from fedplat_server.database.sql_audit import AuditStore
from fedplat_server.errors import Code, RefusedError
from fedplat_server.records.audit import SERVER, AuditAction, AuditEntry

MAX_REMEMBERED = 50_000
"""Callers to remember; the one that called longest ago is dropped first, and then has its full quota again."""


class Bucket(NamedTuple):
    """A token bucket that held `tokens` at the time `at`, in seconds."""

    tokens: float
    at: float


def take(bucket: Bucket, now: float, per_minute: float) -> tuple[Bucket, float]:
    """Take a token if there is one; return the new bucket and the seconds until there is one (0.0: it was taken).

    A bucket holds at most the tokens of one minute and fills at `per_minute`.

    >>> take(Bucket(1.0, at=10.0), now=10.0, per_minute=60)
    (Bucket(tokens=0.0, at=10.0), 0.0)
    >>> take(Bucket(0.0, at=10.0), now=10.25, per_minute=60)
    (Bucket(tokens=0.25, at=10.25), 0.75)
    """
    rate = per_minute / 60.0
    now = max(now, bucket.at)
    tokens = min(bucket.tokens + (now - bucket.at) * rate, per_minute)
    if tokens >= 1.0:
        return Bucket(tokens - 1.0, now), 0.0
    return Bucket(tokens, now), (1.0 - tokens) / rate


class MinimumRate:
    """The minimum rate of a stream: it must bring `min_bytes` in every window of `window_s` seconds."""

    def __init__(self, window_s: float, min_bytes: float, now: float) -> None:
        self._window_s = window_s
        self._min_bytes = min_bytes
        self._ends = now + window_s
        self._missing = min_bytes

    def left_s(self, now: float) -> float:
        """Return the seconds until the stream is too slow."""
        return max(self._ends - now, 0.0)

    def on_received(self, num_bytes: int, now: float) -> None:
        """Count received bytes; begin another window once this one has `min_bytes`."""
        self._missing -= num_bytes
        if self._missing <= 0:
            self._missing = self._min_bytes
            self._ends = now + self._window_s


class Buckets:
    """One token bucket for each caller, the latest `MAX_REMEMBERED` of them."""

    def __init__(self, per_minute: float) -> None:
        self._per_minute = per_minute
        self._buckets: OrderedDict[str, Bucket] = OrderedDict()

    def take(self, name: str, now: float) -> None:
        """Take a token. Raises `RefusedError`, with a retry window, if the bucket is empty."""
        full = Bucket(self._per_minute, now)
        bucket, wait_s = take(self._buckets.pop(name, full), now, self._per_minute)
        self._buckets[name] = bucket
        if len(self._buckets) > MAX_REMEMBERED:
            self._buckets.popitem(last=False)
        if wait_s:
            raise self._refusal(wait_s)

    def require(self, name: str, now: float) -> None:
        """Raise as `take` does if there is no token, but take none."""
        full = Bucket(self._per_minute, now)
        _, wait_s = take(self._buckets.get(name, full), now, self._per_minute)
        if wait_s:
            raise self._refusal(wait_s)

    def give_back(self, name: str) -> None:
        """Return a token that was taken, unless the bucket is full again."""
        bucket = self._buckets.get(name)
        if bucket is not None:
            self._buckets[name] = Bucket(min(bucket.tokens + 1.0, self._per_minute), bucket.at)

    def _refusal(self, wait_s: float) -> RefusedError:
        # At least a second: a caller over its limit must not retry at once. The window spreads the retries.
        earliest_s = max(wait_s, 1.0)
        text = f"at most {self._per_minute:g} a minute"
        return RefusedError(Code.TOO_MANY_REQUESTS, text, RetryWindow(earliest_s, 4.0 * earliest_s))


class NetworkBuckets:
    """A token bucket for each network; with IPv6 also for the /56 and the /48 around it, which one host may own.

    These hold 8 and 32 times as much.
    """

    def __init__(self, per_minute: float) -> None:
        self._own = Buckets(per_minute)
        self._wide = (Buckets(32.0 * per_minute), Buckets(8.0 * per_minute))

    def take(self, network: str, now: float) -> None:
        """Take a token from each. Raises `RefusedError`, with a retry window, if one is empty."""
        for buckets, name in self._find(network):
            buckets.take(name, now)

    def require(self, network: str, now: float) -> None:
        """Raise as `take` does if one is empty, but take none."""
        for buckets, name in self._find(network):
            buckets.require(name, now)

    def give_back(self, network: str) -> None:
        """Return the tokens that were taken."""
        for buckets, name in self._find(network):
            buckets.give_back(name)

    def _find(self, network: str) -> Iterator[tuple[Buckets, str]]:
        yield self._own, network
        if network.startswith("ipv6:"):
            address = network.removeprefix("ipv6:").partition("/")[0]
            yield from zip(self._wide, fair_places.groups_of(address)[:-1], strict=False)


@dataclasses.dataclass(slots=True)
class _Spent:
    key: AttemptKey
    num_bytes: int = 0


class Quotas:
    """The quotas of this server's callers. All methods but `refund_anonymous` raise `RefusedError` beyond a limit."""

    def __init__(self, limits: Limits, clock: Callable[[], float]) -> None:
        self._limits = limits
        self._clock = clock
        self._requests = Buckets(limits.requests_per_minute)
        self._anonymous = NetworkBuckets(limits.anonymous_per_minute)
        self._shared = Buckets(limits.challenges_per_minute)
        self._writes = Buckets(limits.writes_per_minute)
        self._of_operators = Buckets(limits.operator_requests_per_minute)
        self._calls_of_operators: Counter[str] = Counter()
        self._streams: Counter[str] = Counter()
        self._spent: OrderedDict[str, _Spent] = OrderedDict()
        self._sent: OrderedDict[str, _Spent] = OrderedDict()

    def request(self, client_id: str) -> None:
        """Count a request of a client."""
        self._requests.take(client_id, self._clock())

    def session(self, client_id: str) -> None:
        """Count the opening of a session by a client: both a request and a write."""
        self.request(client_id)
        self._writes.take(client_id, self._clock())

    def operator_call(self, name: str) -> Callable[[], None]:
        """Count a call of an operator; return a function to call at its end."""
        self._of_operators.take(name, self._clock())
        limit, calls = self._limits.operator_calls, self._calls_of_operators
        if calls[name] >= limit:
            raise RefusedError(Code.TOO_MANY_CALLS, f"at most {limit} of one operator")
        calls[name] += 1

        def end() -> None:
            calls[name] -= 1
            if not calls[name]:
                del calls[name]

        return end

    def challenge(self, network: str) -> None:
        """Count a nonce that is issued to a caller in `network` (see `addresses.Origin`).

        Each nonce costs at most one look-up and one verification afterwards. A network has its own tokens; when they
        are used up, it takes tokens that all networks share. So a caller that uses them up locks out no client of its
        network, and costs clients of other networks nothing.
        """
        now = self._clock()
        try:
            self._anonymous.take(network, now)
        except RefusedError:
            self._shared.take("", now)

    def charge_anonymous(self, network: str) -> None:
        """Charge an unauthenticated request, or a failed proof, to its network."""
        self._anonymous.take(network, self._clock())

    def require_anonymous(self, network: str) -> None:
        """Refuse an unauthenticated request that would cost a transaction if its network has no tokens; take none."""
        self._anonymous.require(network, self._clock())

    def refund_anonymous(self, network: str) -> None:
        """Refund a network the cost of a challenge, whose caller has since proven to be a client.

        So thousands of clients behind one address, which all open a session after a restart of the server, only pay
        for challenges not yet answered.
        """
        self._anonymous.give_back(network)

    @contextlib.contextmanager
    def stream(self, client_id: str) -> Generator[None]:
        """Count a stream of a client while the block runs."""
        limit = self._limits.max_streams
        if self._streams[client_id] >= limit:
            raise RefusedError(Code.TOO_MANY_STREAMS, f"at most {limit}")
        self._streams[client_id] += 1
        try:
            yield
        finally:
            self._streams[client_id] -= 1
            if not self._streams[client_id]:
                del self._streams[client_id]

    def upload(self, client_id: str, key: AttemptKey, limit_bytes: int, num_bytes: int) -> None:
        """Count uploaded bytes of an attempt, including those sent again.

        `limit_bytes` is the largest size that one upload may announce.
        """
        self._spend(self._spent, client_id, key, self._limits.max_upload_factor * limit_bytes, num_bytes)

    def step(self, client_id: str, key: AttemptKey, limit_bytes: int, num_bytes: int) -> None:
        """Count bytes of new messages of steps; at most `limit_bytes` are accepted for an attempt."""
        self._spend(self._sent, client_id, key, limit_bytes, num_bytes)

    def refund(self, client_id: str, key: AttemptKey, num_bytes: int) -> None:
        """Uncount uploaded bytes that the client sends again because the server could not store them."""
        spent = self._spent.get(client_id)
        if spent is not None and spent.key == key:
            spent.num_bytes -= num_bytes

    def _spend(
        self, clients: OrderedDict[str, _Spent], client_id: str, key: AttemptKey, limit_bytes: float, num_bytes: int
    ) -> None:
        spent = clients.pop(client_id, None)
        if spent is None or spent.key != key:  # a client works for one attempt at a time
            spent = _Spent(key)
        clients[client_id] = spent
        if len(clients) > MAX_REMEMBERED:
            clients.popitem(last=False)
        spent.num_bytes += num_bytes
        if spent.num_bytes > limit_bytes:
            raise RefusedError(
                Code.TOO_MANY_BYTES, f"{spent.num_bytes} bytes were sent; expected at most {limit_bytes}"
            )


HOUR_S = 3600.0


class BoundedAudit:
    """Appends entries, at most `per_minute` of them from all callers together; `clock` is monotonic, in seconds."""

    def __init__(self, audit: AuditStore, per_minute: float, clock: Callable[[], float]) -> None:
        self._audit = audit
        self._per_minute = per_minute
        self._clock = clock
        self._bucket = Bucket(per_minute, clock())
        self._num_left_out = 0

    async def append(self, entry: AuditEntry) -> None:
        """Append an entry, preceded by one that counts those left out before; beyond the limit, only count it."""
        self._bucket, wait_s = take(self._bucket, self._clock(), self._per_minute)
        if wait_s:
            self._num_left_out += 1
        else:
            await self._append([entry])

    async def finish(self) -> None:
        """Append the entry that counts those left out, if there were any. Call it when the server stops."""
        if self._num_left_out:
            await self._append([])

    async def _append(self, entries: list[AuditEntry]) -> None:
        left_out, self._num_left_out = self._num_left_out, 0
        if left_out:
            entries = [AuditEntry(SERVER, AuditAction.NOT_NOTED, "", {"num_rows": left_out}), *entries]
        try:
            await self._audit.append(entries)
        except BaseException:
            self._num_left_out += left_out
            raise


class RecentEntries:
    """The names added in the last `period_s` seconds, at most `max_names`: records each name once per period."""

    def __init__(self, period_s: float = HOUR_S, max_names: int = 50_000) -> None:
        self._period_s = period_s
        self._max_names = max_names
        self._seen: OrderedDict[str, float] = OrderedDict()

    def add(self, name: str, now: float) -> bool:
        """Add a name at `now`, in seconds; return whether it was new in this period."""
        added = self._seen.get(name)
        if added is not None and now < added + self._period_s:
            return False
        self._seen.pop(name, None)
        self._seen[name] = now
        if len(self._seen) > self._max_names:
            self._seen.popitem(last=False)
        return True

    def forget(self, name: str) -> None:
        """Remove a name: recording it failed, so that the next `add` must accept it."""
        self._seen.pop(name, None)
