"""Back-off, retry windows, stop signals, and the records that carry times."""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable

import grpc
import pytest

from fedplat import wire
from fedplat.model import Parameters
from fedplat.wire.v1 import model_pb2
from fedplat_client import Cancelled, ClientOptions
from fedplat_client.backoff import Backoff, PollTime, draw_s, retry
from fedplat_client.cancellation import Stop, StopSignal, reason_name
from fedplat_client.errors import CallError, CallRefusedError, ServerUnavailableError, UnreachableError
from support.fake_fleet import FakeFleet
from support.transfers import MakeClient, run


class Extreme(random.Random):
    """Draws one end of every range."""

    def __init__(self, high: bool) -> None:
        super().__init__()
        self.high = high

    def uniform(self, a: float, b: float) -> float:
        return b if self.high else a


@pytest.mark.fault("F19", "F32")
def test_the_back_off_is_full_jitter_bounded_and_starts_anew() -> None:
    high = Backoff(ClientOptions(first_backoff_s=0.5, max_backoff_s=6.0, rng=Extreme(high=True)))
    assert [high.next_s() for _ in range(6)] == [0.5, 1.0, 2.0, 4.0, 6.0, 6.0]
    high.reset()
    assert high.next_s() == 0.5
    low = Backoff(ClientOptions(rng=Extreme(high=False)))
    assert [low.next_s() for _ in range(3)] == [0.0, 0.0, 0.0]
    assert all(math.isfinite(high.next_s()) for _ in range(2000))


@pytest.mark.parametrize(
    "text", ["Socket closed", "Received RST_STREAM with error code 2", "the connection was closed"]
)
def test_a_poll_that_was_cut_makes_the_next_one_shorter(text: str) -> None:
    cut, poll = UnreachableError("UNAVAILABLE", text), PollTime(60.0)
    poll.note_failure(UnreachableError("UNAVAILABLE", "failed to connect to all addresses"), 50.0)
    poll.note_failure(ServerUnavailableError("RESOURCE_EXHAUSTED", "the server is busy"), 50.0)
    poll.note_failure(cut, 4.9)
    assert poll.wait_s == 60.0
    poll.note_failure(cut, 50.0)
    assert poll.wait_s == 40.0
    poll.note_answer()
    assert poll.wait_s == 42.0
    poll.note_failure(cut, 5.5)
    assert poll.wait_s == 5.0
    for _ in range(52):
        poll.note_answer()
    assert poll.wait_s == 60.0
    short = PollTime(2.0)
    short.note_failure(cut, 10.0)
    assert short.wait_s == 2.0


def test_a_client_polls_for_a_shorter_time_after_a_cut(
    fleet: FakeFleet, make_client: MakeClient, base: Parameters
) -> None:
    fleet.assign(fleet.add_model(base))
    fleet.failures["CheckIn"] = [grpc.StatusCode.UNAVAILABLE] * 2
    run(make_client(clock=lambda: 20.0 * fleet.calls.count("CheckIn")))
    assert [request.wait_s for request in fleet.requests["CheckIn"]] == [60.0, 16.0, 16.0]


def test_equal_seeds_wait_equally_and_others_do_not() -> None:
    def delays(seed: int) -> list[float]:
        backoff = Backoff(ClientOptions(rng=random.Random(seed)))
        return [backoff.next_s() for _ in range(10)]

    assert delays(1) == delays(1)
    assert delays(1) != delays(2)


@pytest.mark.parametrize(
    ("window", "low", "high"),
    [
        ((2.0, 5.0), 2.0, 5.0),
        ((0.0, 0.0), 0.0, 0.0),
        ((5.0, 2.0), 5.0, 5.0),
        ((-3.0, -1.0), 0.0, 0.0),
        ((math.nan, math.nan), 0.0, 0.0),
        ((1.0, math.inf), 1.0, 86_400.0),
        ((1e12, 1e13), 86_400.0, 86_400.0),
    ],
)
@pytest.mark.fault("F32")
def test_a_retry_window_is_drawn_from_and_never_trusted(window: tuple[float, float], low: float, high: float) -> None:
    message = model_pb2.RetryWindow(min_s=window[0], max_s=window[1])
    assert draw_s(message, Extreme(high=False)) == low
    assert draw_s(message, Extreme(high=True)) == high


@pytest.mark.parametrize(
    "make",
    [
        lambda: ClientOptions(check_in_wait_s=0),
        lambda: ClientOptions(max_backoff_s=math.nan),
        lambda: ClientOptions(transfer_attempts=0),
        lambda: ClientOptions(cache_limit_bytes=-1),
        lambda: ClientOptions(inline_limit_bytes=wire.INLINE_BYTES + 1),
    ],
)
def test_options_are_validated_where_they_are_made(make: Callable[[], ClientOptions]) -> None:
    with pytest.raises(ValueError, match="expected"):
        make()


def test_a_stop_signal_cancels_what_is_attached_and_keeps_its_first_reason() -> None:
    stop_signal = StopSignal()
    stop_signal.check()
    cancelled: list[str] = []
    with stop_signal.attach(lambda: cancelled.append("done")):
        pass
    with stop_signal.attach(lambda: cancelled.append("pending")):
        thread = threading.Thread(target=stop_signal.set, args=[Stop(model_pb2.REASON_SURPLUS, "enough")])
        thread.start()
        assert stop_signal.wait(60)
        thread.join()
    with stop_signal.attach(lambda: cancelled.append("late")):
        pass
    assert cancelled == ["pending", "late"]
    stop_signal.set(Stop(model_pb2.REASON_CLIENT_STOPPED, "stopped"))
    with pytest.raises(Cancelled, match="SURPLUS: enough") as caught:
        stop_signal.check()
    assert (caught.value.reason, caught.value.text) == ("SURPLUS", "enough")


@pytest.mark.fault("F28")
def test_reasons_of_a_newer_server_have_a_name_too() -> None:
    assert reason_name(model_pb2.REASON_NO_WORK) == "NO_WORK"
    assert reason_name(999) == "999"


class Waits:
    """Delays that were waited for; the signal is set after `until` of them."""

    def __init__(self, until: int = 1000) -> None:
        self.delays_s: list[float] = []
        self._until = until

    def __call__(self, signal: StopSignal, delay_s: float) -> bool:
        self.delays_s.append(delay_s)
        return len(self.delays_s) >= self._until


def failing(times: int, code: str = "UNAVAILABLE") -> Callable[[], str]:
    """A call that fails so often, and then answers."""
    left = iter(range(times))

    def call() -> str:
        for number in left:
            raise ServerUnavailableError(code, f"failure {number}")
        return "answer"

    return call


def options_of(waits: Waits) -> ClientOptions:
    return ClientOptions(first_backoff_s=0.5, rng=Extreme(high=True), wait=waits)


def test_a_call_is_repeated_until_the_server_answers() -> None:
    waits, recovered = Waits(), list[str]()
    answer = retry(failing(3), options_of(waits), StopSignal(), recover=lambda exc: recovered.append(str(exc)))
    assert answer == "answer"
    assert waits.delays_s == [0.5, 1.0, 2.0]
    assert recovered == [f"UNAVAILABLE: failure {number}" for number in range(3)]


def test_a_call_that_keeps_failing_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """Else a client whose server has lost its database is silent in the middle of a task."""
    retry(failing(2), options_of(Waits()), StopSignal())
    assert caplog.messages == []
    retry(failing(65), options_of(Waits()), StopSignal())
    numbers = [message.rpartition(" ")[2] for message in caplog.messages]
    assert numbers == ["2", "29", "59"]
    assert caplog.messages[0] == "The server cannot be used, and is tried again: failure 2"


def test_the_last_attempt_is_not_followed_by_a_wait() -> None:
    waits = Waits()
    with pytest.raises(ServerUnavailableError, match="failure 2"):
        retry(failing(9), options_of(waits), StopSignal(), attempts=3)
    assert waits.delays_s == [0.5, 1.0]


def test_a_signal_ends_the_repetition() -> None:
    waits, recovered = Waits(until=2), list[str]()
    with pytest.raises(ServerUnavailableError, match="failure 1"):
        retry(failing(9), options_of(waits), StopSignal(), recover=lambda exc: recovered.append(str(exc)))
    assert len(recovered) == 1


def test_errors_that_time_does_not_heal_are_raised_at_once() -> None:
    waits = Waits()

    def refuse() -> str:
        raise CallRefusedError("NOT_FOUND", "no such task")

    def give_up(exc: ServerUnavailableError) -> None:
        raise exc

    with pytest.raises(CallRefusedError):
        retry(refuse, options_of(waits), StopSignal())
    assert waits.delays_s == []
    with pytest.raises(ServerUnavailableError, match="failure 0"):
        retry(failing(9), options_of(waits), StopSignal(), recover=give_up)


CUT = UnreachableError("UNAVAILABLE", "Stream removed")


@pytest.mark.parametrize(
    ("exc", "lasted_s", "delays"),
    [
        (CUT, 50.0, [0.5, 0.5, 0.5]),  # by a load balancer, each time
        (UnreachableError("UNAVAILABLE", "Received http2 header with status: 504"), 60.0, [0.5, 0.5, 0.5]),
        (CUT, 0.2, [0.5, 1.0, 2.0]),
        (UnreachableError("UNAVAILABLE", "failed to connect to all addresses"), 20.0, [0.5, 1.0, 2.0]),
        (UnreachableError("UNAVAILABLE", "DNS resolution failed for host:1"), 20.0, [0.5, 1.0, 2.0]),
        (ServerUnavailableError("DEADLINE_EXCEEDED", "Deadline Exceeded"), 90.0, [0.5, 1.0, 2.0]),
    ],
)
def test_a_wait_that_a_load_balancer_ends_is_no_failure(exc: CallError, lasted_s: float, delays: list[float]) -> None:
    backoff = Backoff(ClientOptions(first_backoff_s=0.5, rng=Extreme(high=True)))
    assert [backoff.next_after(exc, lasted_s) for _ in range(3)] == delays


def test_steps_that_wait_are_repeated_without_a_growing_back_off() -> None:
    times, waits, answers = [0.0], list[float](), [CUT, CUT, CUT]

    def wait(signal: StopSignal, seconds: float) -> bool:
        waits.append(seconds)
        return False

    def call() -> str:
        times[0] += 50.0
        if answers:
            raise answers.pop()
        return "answer"

    options = ClientOptions(first_backoff_s=0.5, rng=Extreme(high=True), wait=wait, clock=lambda: times[0])
    assert retry(call, options, StopSignal()) == "answer"
    assert waits == [0.5, 0.5, 0.5]
