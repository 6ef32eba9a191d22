"""Retries while a server cannot be reached temporarily: unknown host name, lost connection, or no leader.

>>> patience = Patience(60.0, print)  # doctest: +SKIP
>>> patience.run(client, lambda: client.create_job(text, digest, key))  # doctest: +SKIP
waiting for fed.example.org:7443: the host name is not known; trying for 60 s

Lasting errors (a certificate that is not trusted, a token that the server refuses) are raised at once.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

from fedplat.errors import ServerUnreachableError

DEFAULT_TIMEOUT_S = 60.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 5.0
_PROBE_S = 10.0
_CUT_AFTER_S = 1.0
"""How long a watch has lasted at least if its end counts as that of a load balancer, which ends silent connections."""
Result = TypeVar("Result")


class Reachable(Protocol):
    """What a retry asks of a client: whether its server answers, and what it is called (`AdminClient`)."""

    @property
    def server(self) -> str:
        """Return the server's address."""
        ...

    def status(self, timeout_s: float | None = None) -> object:
        """Return the server's status. Raises `ServerUnreachableError`."""
        ...


class Patience:
    """The retry limit of a command, in seconds from the first failure. It starts again after each success."""

    def __init__(
        self,
        timeout_s: float,
        tell: Callable[[str], object],
        *,
        pause: Callable[[float], object] = time.sleep,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.timeout_s = timeout_s
        self._tell = tell
        self._pause = pause
        self._now = now
        self._num_pauses, self._ends_at = 0, 0.0

    def run(self, client: Reachable, call: Callable[[], Result], *, watches: bool = False) -> Result:
        """Call `call` until the server answers, and return its result; `call` must be safe to repeat.

        A call that `watches` may be silent for long. If one that has lasted ends, and the server then answers, the time
        starts again. Raises the errors of `call`, and `ServerUnreachableError` when the time is over.
        """
        while True:
            began = self._now()
            try:
                result = call()
            except ServerUnreachableError as exc:
                was_cut = watches and self.timeout_s > 0.0 and self._now() - began >= _CUT_AFTER_S
                if was_cut and self._answers(client):
                    self.reset()
                else:
                    self._wait(client, exc)
            else:
                self.reset()
                return result

    def reset(self) -> None:
        """Start again, because the server has answered."""
        self._num_pauses = 0

    def _answers(self, client: Reachable) -> bool:
        """Return whether the server answers after a short pause: all watches of a load balancer may end at once."""
        self._pause(_FIRST_PAUSE_S * random.uniform(0.5, 1.0))
        try:
            client.status(_PROBE_S)
        except ServerUnreachableError:
            return False
        return True

    def _wait(self, client: Reachable, failure: ServerUnreachableError) -> None:
        """Wait until the server answers, with exponential random pauses, so that many commands do not retry at once.

        Raises the latest failure when the time is over, or at once if it is lasting.
        """
        if not self._num_pauses:
            self._ends_at = self._now() + self.timeout_s
        while True:
            left_s = self._ends_at - self._now()
            if failure.is_lasting or self.timeout_s <= 0.0:
                raise failure
            if left_s <= 0.0:
                raise ServerUnreachableError(
                    f"{failure}; gave up after {self.timeout_s:g} s", reason=failure.reason
                ) from failure
            if not self._num_pauses:
                self._tell(f"waiting for {client.server}: {failure.reason}; trying for {self.timeout_s:g} s")
            longest_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** min(self._num_pauses, 10))
            self._num_pauses += 1
            self._pause(min(left_s, longest_s * random.uniform(0.5, 1.0)))
            try:
                client.status(min(_PROBE_S, max(0.5, self._ends_at - self._now())))
            except ServerUnreachableError as exc:
                failure = exc
            else:
                return
