"""Noise of a key: what the cipher gives, that it is normal, and that any part of it can be had again."""

from __future__ import annotations

import hashlib
import hmac

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedplat.privacy import KEY_BYTES, Noise

KEY = bytes(range(KEY_BYTES))
NOISE = Noise(KEY)


def test_numbers_are_those_of_box_and_muller_of_the_cipher_s_blocks() -> None:
    stream = hmac.digest(KEY, b"sum", hashlib.sha256)
    block = Cipher(algorithms.AES(stream), modes.ECB()).encryptor()
    words = [int.from_bytes(block.update((5).to_bytes(16, "big"))[8 * i : 8 * i + 8], "little") >> 11 for i in (0, 1)]
    radius, angle = np.sqrt(-2 * np.log((words[0] + 1) / 2**53)), 2 * np.pi * words[1] / 2**53
    assert NOISE.normal("sum", 10, 2) == pytest.approx([radius * np.cos(angle), radius * np.sin(angle)], rel=1e-12)


@settings(max_examples=50, deadline=None)
@given(first=st.integers(0, 1000), size=st.integers(0, 100))
def test_a_part_is_the_same_whatever_comes_before_it(first: int, size: int) -> None:
    whole = NOISE.normal("sum", 0, 1200)
    assert np.array_equal(NOISE.normal("sum", first, size), whole[first : first + size])


def test_the_numbers_are_normal_and_independent() -> None:
    values = NOISE.normal("sum", 0, 200_000)
    assert stats.kstest(values, "norm").pvalue > 0.01
    assert abs(stats.kurtosis(values)) < 0.05
    for lag in (1, 2, 17):
        assert abs(np.corrcoef(values[:-lag], values[lag:])[0, 1]) < 0.01


def test_streams_and_keys_are_independent() -> None:
    others = [NOISE.normal("count", 0, 50_000), Noise(bytes(KEY_BYTES)).normal("sum", 0, 50_000)]
    for other in others:
        assert abs(np.corrcoef(NOISE.normal("sum", 0, 50_000), other)[0, 1]) < 0.02
    assert NOISE.derive_key("a") != NOISE.derive_key("b") != KEY


def test_a_key_is_not_shown() -> None:
    assert KEY.hex() not in repr(NOISE)
    assert repr(NOISE) == "Noise(...)"
    with pytest.raises(ValueError, match="expected 32"):
        Noise(b"short")
