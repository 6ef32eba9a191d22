"""The digests of updates, and programs without the package `blake3`."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from fedplat.wire import digests
from fedplat.wire.digests import UpdateHash

BLAKE3_OF_NOTHING = "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"
"""From the test vectors of BLAKE3."""


@pytest.mark.parametrize("kind", ["", pytest.param(digests.BLAKE3, id="blake3")])
def test_a_digest_does_not_depend_on_the_pieces(tmp_path: Path, kind: str) -> None:
    if kind:
        pytest.importorskip("blake3")
    content = np.arange(5000, dtype=np.float32)
    path = tmp_path / "file"
    path.write_bytes(content.tobytes())
    whole, pieces = UpdateHash(kind), UpdateHash(kind)
    whole.update(content.data)  # memory of numbers, not of bytes
    for start in range(0, 20_000, 999):
        pieces.update(content.tobytes()[start : start + 999])
    assert whole.digest == pieces.digest == digests.hash_file(path, kind)
    assert digests.is_digest(whole.digest)
    assert digests.kind_of(whole.digest) == kind


def test_the_digest_of_nothing() -> None:
    assert UpdateHash().digest == hashlib.sha256().hexdigest()
    pytest.importorskip("blake3")
    assert UpdateHash(digests.BLAKE3).digest == f"b3:{BLAKE3_OF_NOTHING}"


@pytest.mark.parametrize("text", ["", "b3:", "0" * 63, "b3:" + "G" * 64, "0" * 65, "0" * 64 + "\n", "B3:" + "0" * 64])
def test_other_texts_are_no_digests(text: str) -> None:
    assert not digests.is_digest(text)
