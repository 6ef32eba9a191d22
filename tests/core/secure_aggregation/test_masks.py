"""Masks are the key stream of AES, uniform, and different for every pair; what two clients derive is pinned."""

from __future__ import annotations

import hashlib
import subprocess
import sys

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from scipy import stats

from fedplat.errors import SecureAggregationError
from fedplat.secure_aggregation import primitives, shamir
from fedplat.secure_aggregation.primitives import KeyPair, ShareLink, SharePair, check_public_key
from support.secure_group import random_of

KEY = bytes(range(32))
CONTEXT = hashlib.sha256(b"context").digest()


def mask(key: bytes, size: int, modulus: int = 32) -> primitives.Vector:
    vector = np.zeros(size, np.uint32)
    primitives.apply_masks(vector, modulus, [key], [])
    return vector


@pytest.mark.parametrize("with_gcm", [False, True])
@pytest.mark.parametrize("sizes", [[4], [32], [36], [16, 0], [64, 128, 20], [4 << 15] * 2 + [12]])
def test_a_stream_is_the_same_bytes_with_both_modes_whatever_its_pieces(sizes: list[int], with_gcm: bool) -> None:
    expected = Cipher(algorithms.AES(KEY), modes.CTR(bytes(16))).encryptor().update(bytes(sum(sizes)))
    stream, room = primitives.MaskStream(KEY, with_gcm=with_gcm), memoryview(bytearray(2**18))
    found = b""
    for size in sizes:
        stream.read_into(room, size)
        found += room[:size]
    assert found == expected


def test_a_mask_is_the_key_stream_of_aes_from_counter_zero() -> None:
    size = 70_001  # several blocks, and a part of one
    stream = Cipher(algorithms.AES(KEY), modes.CTR(bytes(16))).encryptor().update(bytes(4 * size))
    for modulus in (32, 21, 8):
        expected = np.frombuffer(stream, "<u4") & np.uint32(2**modulus - 1)
        assert np.array_equal(mask(KEY, size, modulus), expected)


def test_threads_and_many_keys_give_the_same_sum() -> None:
    keys = [hashlib.sha256(b"%d" % i).digest() for i in range(300)]
    start = np.arange(300_001, dtype=np.uint32)
    expected = start + sum((mask(key, len(start)) for key in keys[:290]), np.zeros_like(start))
    expected -= sum((mask(key, len(start)) for key in keys[290:]), np.zeros_like(start))
    for workers in (1, 2, 7):
        vector = start.copy()
        primitives.apply_masks(vector, 32, keys[:290], keys[290:], workers)
        assert np.array_equal(vector, expected)
    primitives.apply_masks(vector, 32, keys[290:], keys[:290])
    assert np.array_equal(vector, start)


@pytest.mark.parametrize("modulus", [32, 20, 8])
def test_the_numbers_of_a_mask_are_uniform(modulus: int) -> None:
    numbers = mask(KEY, 1 << 20, modulus)
    whole_bytes = numbers.view(np.uint8).reshape(-1, 4)[:, : modulus // 8]
    assert stats.chisquare(np.bincount(whole_bytes.ravel(), minlength=256)).pvalue > 0.01
    high = numbers >> np.uint32(modulus - 8)  # the highest bits: no value at either end is missing
    assert stats.chisquare(np.bincount(high, minlength=256)).pvalue > 0.01
    assert len(np.bincount(high, minlength=256)) == 256
    bits = [int(((numbers >> np.uint32(bit)) & np.uint32(1)).sum()) for bit in range(modulus)]
    assert all(abs(ones / len(numbers) - 0.5) < 5 * 0.5 / 1024 for ones in bits)
    assert abs(np.corrcoef(numbers[:-1].astype(float), numbers[1:].astype(float))[0, 1]) < 0.005


@pytest.mark.parametrize("size", [46, pytest.param(201, marks=pytest.mark.slow)])  # 1035 and 20,100 pairs
def test_no_two_pairs_share_a_mask_and_keys_have_256_bits(size: int) -> None:
    pairs = [KeyPair.draw(random_of(f"pair {i}")) for i in range(size)]
    keys = {
        (one, other): primitives.derive_pair_key(pairs[one], pairs[other].public, CONTEXT, (one, other))
        for other in range(size)
        for one in range(other)
    }
    assert len(keys) == size * (size - 1) // 2 == len(set(keys.values()))
    assert len({mask(key, 4).tobytes() for key in keys.values()}) == len(keys)
    for one, other in ((0, 1), (7, 45), (13, 14)):
        assert primitives.derive_pair_key(pairs[other], pairs[one].public, CONTEXT, (other, one)) == keys[one, other]
    ones = np.unpackbits(np.frombuffer(b"".join(keys.values()), np.uint8).reshape(-1, 32), axis=1).mean(axis=0)
    assert len(ones) == 256
    assert np.abs(ones - 0.5).max() < 5 * 0.5 / np.sqrt(len(keys))


def test_keys_depend_on_everything_that_they_are_bound_to() -> None:
    one, other = KeyPair(KEY), KeyPair(KEY[::-1])
    derived = {
        primitives.derive_pair_key(one, other.public, CONTEXT, (3, 5)),
        primitives.derive_pair_key(one, other.public, CONTEXT, (3, 6)),
        primitives.derive_pair_key(one, other.public, CONTEXT, (4, 5)),
        primitives.derive_pair_key(one, other.public, bytes(32), (3, 5)),
        primitives.derive_pair_key(one, one.public, CONTEXT, (3, 5)),
        primitives.derive_own_key(one.agree(other.public), CONTEXT, 3),
        primitives.derive_own_key(one.agree(other.public), CONTEXT, 4),
        primitives.derive_own_key(one.agree(other.public), bytes(32), 3),
        primitives.commit_seed(one.agree(other.public), CONTEXT, 3),
    }
    assert len(derived) == 9


def test_shares_open_at_their_holder_only() -> None:
    sender, holder = KeyPair(KEY), KeyPair(KEY[::-1])
    shares = SharePair(bytes(32) + b"\x01", bytes(32) + b"\x02")
    link = ShareLink(CONTEXT, 3, 5)
    sealed = link.seal(sender, holder.public, shares)
    assert link.open(holder, sender.public, sealed) == shares
    for wrong in (ShareLink(CONTEXT, 5, 3), ShareLink(CONTEXT, 3, 4), ShareLink(bytes(32), 3, 5)):
        with pytest.raises(SecureAggregationError, match="was changed, or is not of this attempt"):
            wrong.open(holder, sender.public, sealed)
    with pytest.raises(SecureAggregationError, match="was changed"):
        link.open(holder, sender.public, sealed[:-1] + bytes([sealed[-1] ^ 1]))
    too_large = link.seal(sender, holder.public, SharePair(bytes(33), b"\xff" * 33))
    with pytest.raises(SecureAggregationError, match="not an element"):
        link.open(holder, sender.public, too_large)
    assert "x01" not in repr(shares)


def test_all_weak_keys_are_refused() -> None:
    field = 2**255 - 19
    eighth = (
        0x00B8495F16056286FDB1329CEB8D09DA6AC49FF1FAE35616AEB8413B7C7AEBE0,
        0x57119FD0DD4E22D8868E1C58C45C44045BEF839C55B1D0B1248C50A3BC959C5F,
    )
    for point in (0, 1, field - 1, *eighth):
        public = point.to_bytes(32, "little")
        with pytest.raises(SecureAggregationError, match="weak"):
            check_public_key(public)
        with pytest.raises(SecureAggregationError, match="weak"):
            KeyPair(KEY).agree(public)
    for point in (field, field + 1, 2**255 + 9, 2**256 - 1):
        with pytest.raises(SecureAggregationError, match="canonical"):
            check_public_key(point.to_bytes(32, "little"))
    check_public_key(KeyPair(KEY).public)


def test_derivations_are_those_of_this_version_of_the_protocol() -> None:
    """If this fails, clients and servers of different versions compute different sums: raise `setup.VERSION`."""
    one, other = KeyPair(KEY), KeyPair(KEY[::-1])
    pair = primitives.derive_pair_key(one, other.public, CONTEXT, (3, 5))
    own = primitives.derive_own_key(KEY, CONTEXT, 3)
    shares = SharePair(*shamir.split(KEY, 2, [3, 5], random_of("shares")))
    vector = mask(pair, 1000, 31)
    primitives.apply_masks(vector, 31, [], [own])
    parts = {
        "pair": pair,
        "own": own,
        "commitment": primitives.commit_seed(KEY, CONTEXT, 3),
        "shares": shares.seed + shares.key,
        "sealed": ShareLink(CONTEXT, 3, 5).seal(one, other.public, shares),
        "masked": vector.astype("<u4").tobytes(),
    }
    assert {name: hashlib.sha256(content).hexdigest()[:16] for name, content in parts.items()} == {
        "pair": "01525a1731233252",
        "own": "e28eaa67fe4b586e",
        "commitment": "f273a22e4f667887",
        "shares": "e9e28cc717b072ec",
        "sealed": "2bf5b0815d17edc9",
        "masked": "0459aa26fd55a385",
    }


def test_only_the_cryptography_needs_its_library() -> None:
    code = """if True:
        import importlib, sys
        sys.modules["cryptography"] = None  # as if it were not installed
        from fedplat.errors import MissingExtraError
        for name in ("messages", "setup"):
            importlib.import_module("fedplat.secure_aggregation." + name)
        for name in ("participant", "unmasking", "primitives"):
            try:
                importlib.import_module("fedplat.secure_aggregation." + name)
            except MissingExtraError as exc:
                assert "pip install 'cryptography>=" in str(exc)
            else:
                raise AssertionError(name)
    """
    subprocess.run([sys.executable, "-c", code], check=True)
