"""How a client signs its calls: each number of a session once, and one session for all threads."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from fedplat.wire import auth
from fedplat_client._auth.authenticator import Signer, sign_challenge
from fedplat_client._state.data_dir import SigningKey, new_signing_key

METHOD, REQUEST = "/fleet/CheckIn", b"request"


def test_each_call_of_a_session_has_a_number_of_its_own_and_a_signature_over_it() -> None:
    key = SigningKey(new_signing_key())
    signer, opened, barrier = Signer(key), list[str](), threading.Barrier(8)

    def open_session() -> str:
        opened.append(f"session-{len(opened)}")
        return opened[-1]

    def call(_: int) -> tuple[str, int]:
        barrier.wait(60)
        use = signer.use(METHOD, REQUEST, open_session)
        found = dict(use.metadata)
        number = int(found[auth.METADATA_COUNTER])
        signature = found[auth.METADATA_SIGNATURE]
        assert isinstance(signature, bytes)
        payload = auth.call_payload(METHOD, use.session_id, number, REQUEST)
        Ed25519PublicKey.from_public_bytes(key.public).verify(signature, payload)
        return use.session_id, number

    with ThreadPoolExecutor(8) as threads:
        calls = list(threads.map(call, range(64)))
    assert opened == ["session-0"]
    assert sorted(calls) == [("session-0", number) for number in range(1, 65)]


def test_a_session_that_was_lost_is_forgotten_and_a_newer_one_is_kept() -> None:
    """A call of the first session may fail late, when another thread has opened the second one."""
    signer, names = Signer(SigningKey(new_signing_key())), iter(["first", "second", "third"])

    def use() -> tuple[str, str | bytes]:
        made = signer.use(METHOD, REQUEST, lambda: next(names))
        return made.session_id, dict(made.metadata)[auth.METADATA_COUNTER]

    assert use() == ("first", "1")
    signer.forget("first")
    assert not signer.is_current("first")
    assert use() == ("second", "1")
    signer.forget("first")
    assert signer.is_current("second")
    assert use() == ("second", "2")


def test_a_proof_is_over_the_nonce_and_the_request() -> None:
    key = SigningKey(new_signing_key())
    found = dict(sign_challenge(key, METHOD, b"nonce", REQUEST))
    assert found[auth.METADATA_NONCE] == b"nonce"
    signature = found[auth.METADATA_SIGNATURE]
    assert isinstance(signature, bytes)
    payload = auth.proof_payload(METHOD, b"nonce", REQUEST)
    Ed25519PublicKey.from_public_bytes(key.public).verify(signature, payload)
