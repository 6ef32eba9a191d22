"""What one caller may use up: requests, streams at once, bytes for an attempt, and the time of a stream.

A client that is broken or hostile shall cost the others nothing. Nothing here reads a clock: the moment is an argument,
or comes from the function that `Quotas` was given.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter, OrderedDict
from collections.abc import Callable, Generator
from typing import NamedTuple

from fedplat.rounds import AttemptKey
from fedplat.rounds.commands import RetryWindow
from fedplat_server.config import Limits
from fedplat_server.errors import Code, RefusedError

MAX_REMEMBERED = 50_000
"""Callers whose use is remembered; who called longest ago is forgotten, and has everything again."""


class Bucket(NamedTuple):
    """A token bucket: `tokens` there were at the moment `at`, in seconds."""

    tokens: float
    at: float


def take(bucket: Bucket, now: float, per_minute: float) -> tuple[Bucket, float]:
    """Takes a token if there is one: the bucket afterwards, and the seconds until there is one (0.0: it was taken).

    A bucket holds the tokens of a minute and fills at this rate.

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
    """How long a stream may go on: every `window_s` seconds have to bring `min_bytes`."""

    def __init__(self, window_s: float, min_bytes: float, now: float) -> None:
        self._window_s = window_s
        self._min_bytes = min_bytes
        self._ends = now + window_s
        self._missing = min_bytes

    def left_s(self, now: float) -> float:
        """Seconds until the stream is too slow."""
        return max(self._ends - now, 0.0)

    def on_received(self, num_bytes: int, now: float) -> None:
        """Notes bytes; enough of them begin another window."""
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
        """Takes a token. Raises `RefusedError` with the moment when there will be one."""
        full = Bucket(self._per_minute, now)
        bucket, wait_s = take(self._buckets.pop(name, full), now, self._per_minute)
        self._buckets[name] = bucket
        if len(self._buckets) > MAX_REMEMBERED:
            self._buckets.popitem(last=False)
        if wait_s:
            raise self._refusal(wait_s)

    def require(self, name: str, now: float) -> None:
        """Refuse as `take` does where there is no token, but take none."""
        full = Bucket(self._per_minute, now)
        _, wait_s = take(self._buckets.get(name, full), now, self._per_minute)
        if wait_s:
            raise self._refusal(wait_s)

    def give_back(self, name: str) -> None:
        """Gives back a token that was taken, if the bucket is not full again."""
        bucket = self._buckets.get(name)
        if bucket is not None:
            self._buckets[name] = Bucket(min(bucket.tokens + 1.0, self._per_minute), bucket.at)

    def _refusal(self, wait_s: float) -> RefusedError:
        # A second at least: who asks too often shall not ask again at once. The spread keeps callers apart.
        earliest_s = max(wait_s, 1.0)
        text = f"at most {self._per_minute:g} a minute"
        return RefusedError(Code.TOO_MANY_REQUESTS, text, RetryWindow(earliest_s, 4.0 * earliest_s))


@dataclasses.dataclass(slots=True)
class _Spent:
    key: AttemptKey
    num_bytes: int = 0


class Quotas:
    """What the callers of this server have used up. All methods raise `RefusedError`."""

    def __init__(self, limits: Limits, clock: Callable[[], float]) -> None:
        self._limits = limits
        self._clock = clock
        self._requests = Buckets(limits.requests_per_minute)
        self._anonymous = Buckets(limits.anonymous_per_minute)
        self._shared = Buckets(limits.challenges_per_minute)
        self._writes = Buckets(limits.writes_per_minute)
        self._of_operators = Buckets(limits.operator_requests_per_minute)
        self._calls_of_operators: Counter[str] = Counter()
        self._streams: Counter[str] = Counter()
        self._spent: OrderedDict[str, _Spent] = OrderedDict()

    def request(self, client_id: str) -> None:
        """Counts a request of a client."""
        self._requests.take(client_id, self._clock())

    def session(self, client_id: str) -> None:
        """Count a session that a client opens: a request, and one that writes."""
        self.request(client_id)
        self._writes.take(client_id, self._clock())

    def operator_call(self, name: str) -> Callable[[], None]:
        """Count a call of an operator; return what is to be called at its end."""
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
        """Count a nonce that is given to somebody in a network, as `addresses.Origin` names it.

        Each costs at most one look-up and one check of a signature afterwards. A network has tokens of its own, and
        beyond them takes those that all share: so a neighbour who uses them up locks out no client of the network,
        and costs clients elsewhere nothing.
        """
        now = self._clock()
        try:
            self._anonymous.take(network, now)
        except RefusedError:
            self._shared.take("", now)

    def charge_anonymous(self, network: str) -> None:
        """Count a request that has proven nothing, or a proof that failed."""
        self._anonymous.take(network, self._clock())

    def require_anonymous(self, network: str) -> None:
        """Refuse what would cost a transaction to somebody who is no client yet, from a network without tokens."""
        self._anonymous.require(network, self._clock())

    def refund_anonymous(self, network: str) -> None:
        """Give a network back what a challenge cost: its owner has proven to be a client since.

        So thousands of clients behind one address, which all open a session after a restart of the server, only pay
        for those challenges that are not answered yet.
        """
        self._anonymous.give_back(network)

    @contextlib.contextmanager
    def stream(self, client_id: str) -> Generator[None]:
        """Counts a stream of a client while it lasts."""
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
        """Counts bytes of an update of an attempt, those that are sent again too.

        `limit_bytes` is the most that one upload may announce.
        """
        spent = self._spent.pop(client_id, None)
        if spent is None or spent.key != key:  # a client works for one attempt at a time
            spent = _Spent(key)
        self._spent[client_id] = spent
        if len(self._spent) > MAX_REMEMBERED:
            self._spent.popitem(last=False)
        spent.num_bytes += num_bytes
        limit = self._limits.max_upload_factor * limit_bytes
        if spent.num_bytes > limit:
            raise RefusedError(Code.TOO_MANY_BYTES, f"{spent.num_bytes} bytes were sent; at most {limit} are taken")
