"""How silos get each other's files and chunks: at ports with mTLS, and encrypted through the server's relay."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Generator
from pathlib import Path

import pytest

from fedplat.wire.v1 import model_pb2
from fedplat_client._protocols.gossip.network import ByteCounter, ChunkName, RemoteFile
from fedplat_client._state.data_dir import SigningKey, new_signing_key
from fedplat_client.cancellation import Stop
from fedplat_client.errors import Cancelled, PeerError
from fedplat_client.task import Control
from fedplat_server.auth.pki_folder import Authority
from fedplat_server.auth.tls import utc_now
from support.peers import credentials_of
from support.polling import until
from support.silo_networks import NetworkedSilo, Networks, impatient_networks_in, networks_in

CONTENT = bytes(range(256)) * 5_000
DIGEST = hashlib.sha256(CONTENT).hexdigest()
REMOTE = RemoteFile(DIGEST, len(CONTENT))
CHUNK = ChunkName("c" * 64, "ring/1/0")
STOP = Stop(model_pb2.REASON_CLIENT_STOPPED, "the phase is over")


@pytest.fixture
def networks(tmp_path: Path) -> Generator[Networks]:
    with networks_in(tmp_path) as made:
        yield made


@pytest.fixture
def impatient(tmp_path: Path) -> Generator[Networks]:
    """Silos whose waits take no time."""
    with impatient_networks_in(tmp_path) as made:
        yield made


def file_of(silo: NetworkedSilo, content: bytes = CONTENT) -> Path:
    path = silo.folder / "model"
    path.write_bytes(content)
    return path


def exchange(networks: Networks, sender: NetworkedSilo, receiver: NetworkedSilo, content: bytes = CONTENT) -> Path:
    """The receiver's file, after the sender has offered it."""
    with networks.serve(sender, DIGEST, file_of(sender, content), receiver):
        return get(networks, sender, receiver)


def get(networks: Networks, sender: NetworkedSilo, receiver: NetworkedSilo, control: Control | None = None) -> Path:
    return networks.get(sender.contact, receiver, REMOTE, control or networks.control())


def failure(networks: Networks, sender: NetworkedSilo, receiver: NetworkedSilo, content: bytes = CONTENT) -> PeerError:
    with pytest.raises(PeerError) as caught:
        exchange(networks, sender, receiver, content)
    return caught.value


def files_of(silo: NetworkedSilo) -> list[str]:
    return sorted(path.name for path in silo.folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("receiver_has_port", [True, False])
@pytest.mark.parametrize("sender_has_port", [True, False])
def test_a_file_gets_from_any_silo_to_any_other(
    sender_has_port: bool, receiver_has_port: bool, networks: Networks
) -> None:
    sender, receiver = networks.add_all([sender_has_port, receiver_has_port])
    assert exchange(networks, sender, receiver).read_bytes() == CONTENT
    assert bool(networks.relay.calls) is not sender_has_port
    sealed = 0 if sender_has_port else 2 * 16  # two chunks of at most 1 MiB
    assert receiver.network.counter.take() == (0, len(CONTENT) + sealed)
    counted: list[tuple[int, int]] = []

    def has_counted() -> bool:  # the sender does so in a thread, perhaps after the receiver has the file
        counted.append(sender.network.counter.take())
        return any(map(any, counted))

    until(has_counted, "the sender to count its bytes")
    assert counted[-1] == (len(CONTENT) + sealed, 0)


def test_the_server_cannot_read_what_it_relays(networks: Networks) -> None:
    sender, receiver, third = networks.add_all([False, False, False])
    with networks.serve(sender, DIGEST, file_of(sender), receiver, third):
        for each in (receiver, third):
            assert get(networks, sender, each).read_bytes() == CONTENT
    assert CONTENT[:64] not in networks.relay.relayed_bytes
    first, second = networks.relay.files.values()
    assert first.content != second.content  # each is for its receiver alone
    assert files_of(sender) == ["model"]


def test_a_relayed_file_resumes_on_both_sides(networks: Networks) -> None:
    sender, receiver = networks.add_all([False, False])
    networks.relay.cut_uploads = [300_000, 700_000]
    networks.relay.cut_downloads = [200_000, 900_000]
    assert exchange(networks, sender, receiver).read_bytes() == CONTENT
    assert (networks.relay.calls["Upload"], networks.relay.calls["QueryUpload"]) == (3, 2)
    assert networks.relay.calls["Download"] >= 3


def test_a_file_that_the_server_changed_is_refused(networks: Networks) -> None:
    sender, receiver = networks.add_all([False, False])
    networks.relay.change = lambda sealed: sealed[:-1] + bytes([sealed[-1] ^ 1])
    assert failure(networks, sender, receiver).reason == "WRONG_DIGEST"
    assert files_of(receiver) == []
    networks.relay.change = lambda sealed: sealed + bytes(1)
    assert failure(networks, sender, receiver).reason == "WRONG_SIZE"
    networks.relay.change = lambda sealed: sealed[:-1]
    assert failure(networks, sender, receiver).reason == "WRONG_SIZE"
    assert files_of(receiver) == []


def test_a_file_for_another_silo_cannot_be_opened(networks: Networks) -> None:
    """A server that gives the file of one receiver to another."""
    sender, receiver, third = networks.add_all([False, False, False])
    with networks.serve(sender, DIGEST, file_of(sender), third):
        get(networks, sender, third)
    files = networks.relay.files
    files[sender.name, receiver.name, DIGEST] = files[sender.name, third.name, DIGEST]
    with pytest.raises(PeerError) as caught:
        get(networks, sender, receiver)
    assert caught.value.reason == "WRONG_DIGEST"


@pytest.mark.parametrize("has_port", [True, False])
def test_a_sender_with_other_bytes_than_announced_is_not_believed(has_port: bool, impatient: Networks) -> None:
    sender, receiver = impatient.add_all([has_port, True])
    error = failure(impatient, sender, receiver, CONTENT[:-1] + b"!")
    # Through the relay an honest client does not send it.
    assert error.reason == ("WRONG_DIGEST" if has_port else "TIMEOUT")
    assert files_of(receiver) == []


@pytest.mark.parametrize("has_port", [True, False])
def test_a_sender_that_is_silent_is_given_up(has_port: bool, impatient: Networks) -> None:
    sender, receiver = impatient.add_all([has_port, False])
    with pytest.raises(PeerError) as caught:
        get(impatient, sender, receiver, impatient.control())
    assert caught.value.reason == "TIMEOUT"


@pytest.mark.parametrize("has_port", [True, False])
def test_the_end_of_a_phase_ends_a_fetch(has_port: bool, networks: Networks) -> None:
    sender, receiver = networks.add_all([has_port, False])
    control = networks.control()
    ending = threading.Timer(0.05, lambda: control.signal.set(STOP))
    ending.start()
    with pytest.raises(Cancelled):
        get(networks, sender, receiver, control)
    ending.join()


# --- whom a silo trusts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_port", [True, False])
def test_silos_that_are_not_trusted_send_nothing(has_port: bool, impatient: Networks) -> None:
    stranger = impatient.add(1, has_port=has_port)
    known = impatient.add(2, has_port=has_port)
    careful = impatient.add(3, has_port=has_port, trusted={known.contact.public_key})
    assert exchange(impatient, known, careful).read_bytes() == CONTENT
    assert exchange(impatient, careful, known).read_bytes() == CONTENT
    refused = failure(impatient, stranger, careful)
    assert (refused.reason, "is not one of the trusted clients" in str(refused)) == ("REFUSED", True)


def test_a_relay_key_that_the_silo_has_not_signed_is_refused(
    impatient: Networks, caplog: pytest.LogCaptureFixture
) -> None:
    """A server that puts its own key in the place of a silo's, to read the file."""
    forged = impatient.add(1, has_port=False, signs_with=SigningKey(new_signing_key()))
    receiver = impatient.add(2, has_port=False)
    refused = failure(impatient, forged, receiver)
    assert (refused.reason, "is not signed" in str(refused)) == ("REFUSED", True)
    with impatient.serve(receiver, DIGEST, file_of(receiver), forged):
        until(lambda: bool(caplog.records), "the failure is logged")
    assert "is not signed" in caplog.text
    assert (receiver.name, forged.name, DIGEST) not in impatient.relay.files


def test_a_certificate_of_another_authority_reaches_no_port(impatient: Networks) -> None:
    sender = impatient.add(1, has_port=True)
    stranger = impatient.add(2, has_port=False, access=credentials_of(2, Authority.new(utc_now())))
    assert failure(impatient, sender, stranger).reason == "TIMEOUT"


# --- chunks --------------------------------------------------------------------------------------------------


def test_a_chunk_waits_at_the_port_until_it_is_there(networks: Networks) -> None:
    sender, receiver = networks.add_all([True, True])
    listener = sender.network.port.listener
    assert listener is not None
    found: list[bytes] = []

    def receive() -> None:
        found.append(receiver.network.receive_chunk(sender.contact, CHUNK, 1000, networks.control()))

    with listener.expect({receiver.name}):
        waiting = threading.Thread(target=receive)
        waiting.start()
        with listener.offer(CHUNK.offered, bytes(1000), {receiver.name}):
            waiting.join()
    assert found == [bytes(1000)]


@pytest.mark.parametrize("receiver_has_port", [True, False])
def test_a_chunk_goes_through_the_relay_encrypted(receiver_has_port: bool, networks: Networks) -> None:
    sender, receiver = networks.add_all([False, receiver_has_port])
    sender.network.send_chunk(receiver.contact, CHUNK, CONTENT, networks.control())
    assert receiver.network.receive_chunk(sender.contact, CHUNK, len(CONTENT), networks.control()) == CONTENT
    assert CONTENT[:64] not in networks.relay.relayed_bytes
    assert sender.network.counter.take() == (len(CONTENT) + 16, 0)
    assert receiver.network.counter.take() == (0, len(CONTENT) + 16)


def test_a_chunk_of_another_step_is_refused(networks: Networks) -> None:
    sender, receiver = networks.add_all([False, False])
    sender.network.send_chunk(receiver.contact, CHUNK, CONTENT, networks.control())
    other = ChunkName(CHUNK.offered, "ring/1/1")
    files = networks.relay.files
    files[sender.name, receiver.name, other.relayed] = files[sender.name, receiver.name, CHUNK.relayed]
    with pytest.raises(PeerError) as caught:
        receiver.network.receive_chunk(sender.contact, other, len(CONTENT), networks.control())
    assert caught.value.reason == "WRONG_DIGEST"


@pytest.mark.parametrize("difference", [-1, 1])
@pytest.mark.parametrize("has_port", [True, False])
def test_a_chunk_of_another_size_is_refused(has_port: bool, difference: int, networks: Networks) -> None:
    sender, receiver = networks.add_all([has_port, True])
    if (listener := sender.network.port.listener) is not None:
        with listener.offer(CHUNK.offered, CONTENT, {receiver.name}), pytest.raises(PeerError) as caught:
            receiver.network.receive_chunk(sender.contact, CHUNK, len(CONTENT) + difference, networks.control())
    else:
        sender.network.send_chunk(receiver.contact, CHUNK, CONTENT, networks.control())
        with pytest.raises(PeerError) as caught:
            receiver.network.receive_chunk(sender.contact, CHUNK, len(CONTENT) + difference, networks.control())
    assert caught.value.reason == "WRONG_SIZE"


def test_bytes_are_counted_until_they_are_taken() -> None:
    counter = ByteCounter()
    counter.add(sent=3)
    counter.add(sent=4, received=5)
    assert counter.take() == (7, 5)
    assert counter.take() == (0, 0)


def test_what_cannot_be_sent_is_logged_once(networks: Networks, caplog: pytest.LogCaptureFixture) -> None:
    sender, receiver = networks.add_all([False, False])
    with networks.serve(sender, DIGEST, file_of(sender, CONTENT[:-1]), receiver):
        until(lambda: bool(caplog.records), "the failure is logged")
    (record,) = caplog.records
    assert record.message.startswith("A file could not be sent to another silo")
    assert getattr(record, "peer", "") == receiver.name
