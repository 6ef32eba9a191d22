"""Files that clients fetch from each other's listeners: real sockets, real certificates, bad networks, bad peers."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import socket
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from faults import proxy
from fedplat.wire.v1 import model_pb2
from fedplat_client import ClientOptions
from fedplat_client._work.peers.fetch import PeerFetcher, PeerFile, fetch_chunk
from fedplat_client._work.peers.listener import ListenerLimits, PeerListener
from fedplat_client.cancellation import Stop
from fedplat_client.errors import Cancelled, PeerError
from fedplat_server.auth.pki_folder import Authority
from fedplat_server.auth.tls import utc_now
from support.peers import Silos, client_id, credentials_of, silos_in
from support.polling import until


@pytest.fixture
def silos(tmp_path: Path) -> Generator[Silos]:
    with silos_in(tmp_path) as made:
        yield made


def failure(silos: Silos, **options: Any) -> PeerError:
    with pytest.raises(PeerError) as caught:
        silos.fetch(**options)
    return caught.value


def test_a_neighbour_fetches_a_file(silos: Silos) -> None:
    with silos.offer(2, 3):
        path = silos.fetch(2)
    assert path.read_bytes() == silos.content
    assert silos.files() == [f"{silos.digest}.safetensors"]


def test_a_file_that_is_there_is_not_fetched_again(silos: Silos) -> None:
    with silos.offer(2):
        silos.fetch(2)
    assert silos.fetch(2).read_bytes() == silos.content  # nothing is offered any more


def test_a_damaged_file_is_fetched_again(silos: Silos) -> None:
    with silos.offer(2):
        silos.fetch(2).write_bytes(b"damaged")
        assert silos.fetch(2).read_bytes() == silos.content


def test_an_empty_file_is_a_file(tmp_path: Path) -> None:
    with silos_in(tmp_path, 0) as silos, silos.offer(2):
        assert silos.fetch(2).read_bytes() == b""


def test_a_fetch_resumes_after_a_cut(tmp_path: Path) -> None:
    """The neighbour may receive less than what two whole transfers would need."""
    limits = ListenerLimits(sends_per_peer=1.75)
    cut = proxy.Weather(to_client=proxy.Way(cut_after=8_000_000))
    with (
        silos_in(tmp_path, 16_000_000, limits=limits) as silos,
        silos.offer(2),
        proxy.in_thread(silos.address) as network,
    ):
        network.set(cut)
        sizes: list[int] = []

        def waited() -> None:
            sizes.append((silos.fetched / f"{silos.digest}.part").stat().st_size)
            network.set(proxy.CLEAR)

        silos.time.waited = waited
        path = silos.fetch(file=dataclasses.replace(silos.file, address=network.address))
        assert path.read_bytes() == silos.content
        assert 0 < sizes[0] < 8_000_000
        assert network.num_accepted >= 2


def test_a_fetch_resumes_after_a_restart_of_the_process(silos: Silos) -> None:
    silos.fetched.mkdir()
    part = silos.fetched / f"{silos.digest}.part"
    part.write_bytes(silos.content[:2_000_000])
    with silos.offer(2) as path:
        path.write_bytes(bytes(2_000_000) + silos.content[2_000_000:])  # its first part is not asked for
        assert silos.fetch(2).read_bytes() == silos.content


def test_a_peer_that_becomes_a_neighbour_in_the_meantime_is_served(silos: Silos) -> None:
    with contextlib.ExitStack() as stack:
        offers = iter([silos.offer(2)])
        silos.time.waited = lambda: stack.enter_context(next(offers))
        assert silos.fetch(2).read_bytes() == silos.content


def test_who_is_not_a_neighbour_gets_nothing(silos: Silos) -> None:
    with silos.offer(3):
        error = failure(silos, number=2)
    assert error.reason == "TIMEOUT"
    assert "nothing is offered to this client now" in str(error)
    assert silos.files() == [f"{silos.digest}.part"]
    assert (silos.fetched / f"{silos.digest}.part").stat().st_size == 0


def test_a_peer_with_another_name_is_not_believed(silos: Silos) -> None:
    """Its certificate is good, and it has the file."""
    with silos.offer(2):
        error = failure(silos, file=dataclasses.replace(silos.file, client_id=client_id(5)))
    assert error.reason == "TIMEOUT"
    assert "Hostname Verification Check failed" in str(error)


@pytest.mark.parametrize("stranger", ["the listener", "the caller"])
def test_certificates_of_another_authority_are_refused(stranger: str, silos: Silos) -> None:
    other = Authority.new(utc_now())
    if stranger == "the listener":
        credentials = credentials_of(2, silos.authority, trusted=other)
    else:
        credentials = credentials_of(2, other, trusted=silos.authority)
    with silos.offer(2):
        error = failure(silos, credentials=credentials)
    assert error.reason == "TIMEOUT"
    assert "UNAVAILABLE" in str(error)


def test_a_file_above_the_limit_is_not_requested(silos: Silos) -> None:
    error = failure(silos, max_bytes=len(silos.content) - 1)
    assert (error.reason, silos.fetched.exists()) == ("TOO_LARGE", True)
    assert not silos.files()
    assert failure(silos, options=dataclasses.replace(silos.options, max_model_bytes=1000)).reason == "TOO_LARGE"


@pytest.mark.parametrize("difference", [-1, 1])
def test_a_file_of_another_size_is_deleted(difference: int, silos: Silos) -> None:
    announced = len(silos.content) + difference
    with silos.offer(2):
        error = failure(silos, file=dataclasses.replace(silos.file, size_bytes=announced))
    assert error.reason == "WRONG_SIZE"
    assert not silos.files()


def test_a_file_with_other_bytes_is_deleted(silos: Silos) -> None:
    changed = bytearray(silos.content)
    changed[1_234_567] ^= 1
    with silos.offer(2, content=bytes(changed)):
        error = failure(silos)
        assert error.reason == "WRONG_DIGEST"
        assert hashlib.sha256(changed).hexdigest() in str(error)
        assert not silos.files()


def test_a_digest_that_is_no_digest_is_no_file_name(silos: Silos) -> None:
    for digest in ("../../evil", "A" * 64, ""):
        with pytest.raises(Exception, match="expected 64 lower-case hexadecimal digits"):
            silos.fetch(file=dataclasses.replace(silos.file, digest=digest))


def test_a_peer_that_accepts_and_stays_silent_is_given_up(silos: Silos) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        error = failure(
            silos, file=dataclasses.replace(silos.file, address=address), timeout_s=0.3, options=ClientOptions()
        )
    assert error.reason == "TIMEOUT"
    assert f"at {address} sent 0 of 3000000 bytes within the deadline" in str(error)


def test_a_slow_peer_is_given_up_and_what_it_sent_is_kept(silos: Silos) -> None:
    slow = proxy.Weather(to_client=proxy.Way(bytes_per_s=100_000))
    with silos.offer(2), proxy.in_thread(silos.address) as network:
        file = dataclasses.replace(silos.file, address=network.address)
        network.set(slow)
        assert failure(silos, file=file, timeout_s=0.5, options=ClientOptions()).reason == "TIMEOUT"
        assert silos.files() == [f"{silos.digest}.part"]
        network.set(proxy.CLEAR)
        assert silos.fetch(file=file).read_bytes() == silos.content


def test_a_peer_that_is_away_is_tried_until_the_deadline(silos: Silos) -> None:
    silos.listener.__exit__()
    waits: list[float] = []
    silos.time.waited = lambda: waits.append(silos.time.now_s)
    assert failure(silos, timeout_s=100.0).reason == "TIMEOUT"
    assert silos.time.now_s == pytest.approx(100.0)
    assert len(waits) > 5


def test_a_stopped_client_stops_its_fetch(silos: Silos) -> None:
    stop = Stop(model_pb2.REASON_CLIENT_STOPPED, "the client was stopped")
    silos.time.waited = lambda: silos.signal.set(stop)
    with silos.offer(3), pytest.raises(Cancelled):
        silos.fetch(2)


def test_a_refusal_for_good_is_not_repeated(tmp_path: Path) -> None:
    silos_of_one = silos_in(tmp_path, limits=ListenerLimits(sends_per_peer=0.5))
    with silos_of_one as silos, silos.offer(2):
        silos.time.waited = lambda: pytest.fail("it waited")
        error = failure(silos)
        assert error.reason == "REFUSED"
        assert "0.5 times the bytes" in str(error)


def test_two_fetches_of_one_digest_take_turns(silos: Silos) -> None:
    """Two neighbours may have equal models, as all have at the beginning."""
    other = credentials_of(3, silos.authority)
    fetcher = PeerFetcher(silos.fetched, silos.options)
    with PeerListener("127.0.0.1:0", lambda: other) as second, silos.offer(2) as path:
        second.open()
        files = [silos.file, PeerFile(client_id(3), f"localhost:{second.port}", silos.digest, len(silos.content))]
        own = credentials_of(2, silos.authority)
        with second.offer(silos.digest, path, [client_id(2)]), ThreadPoolExecutor() as pool:
            fetching = [pool.submit(fetcher.fetch, file, own, 60.0, silos.signal, 2**40) for file in files * 2]
            found = [each.result() for each in fetching]
    assert {path.read_bytes() == silos.content for path in found} == {True}
    assert silos.files() == [f"{silos.digest}.safetensors"]


# --- chunks in memory ------------------------------------------------------------------------------------------------

CHUNK_NAME = "c" * 64


def fetch_one(silos: Silos, size_bytes: int, timeout_s: float = 60.0, options: ClientOptions | None = None) -> bytes:
    file = PeerFile(client_id(1), silos.address, CHUNK_NAME, size_bytes)
    with credentials_of(2, silos.authority).connect(silos.address, client_id(1)) as channel:
        return fetch_chunk(channel, file, timeout_s, silos.signal, options or silos.options)


def test_a_chunk_is_fetched_once_it_is_offered(silos: Silos) -> None:
    chunk = silos.content[:1_000_000]
    with ThreadPoolExecutor() as executor, silos.listener.expect([client_id(2)]):
        fetched = executor.submit(fetch_one, silos, len(chunk))
        until(lambda: silos.listener.num_waits == 1, "a call that waits")
        with silos.listener.offer(CHUNK_NAME, chunk, [client_id(2)]):
            assert fetched.result(60.0) == chunk


@pytest.mark.parametrize("size_bytes", [99, 101])
def test_a_chunk_of_another_size_is_refused(silos: Silos, size_bytes: int) -> None:
    with silos.listener.offer(CHUNK_NAME, bytes(100), [client_id(2)]), pytest.raises(PeerError) as caught:
        fetch_one(silos, size_bytes)
    assert caught.value.reason == "WRONG_SIZE"


def test_a_chunk_that_is_not_offered_is_given_up(silos: Silos) -> None:
    with pytest.raises(PeerError, match="within the deadline") as caught:
        fetch_one(silos, 100, timeout_s=5.0)
    assert caught.value.reason == "TIMEOUT"
