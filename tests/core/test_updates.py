"""The file of an encoded update: it is read back as it was written, and any other file is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedplat import codecs
from fedplat.codecs.container import Format, options_from_text, options_to_text
from fedplat.errors import CodecError, ModelError
from fedplat.model import BLOCK, Parameters
from fedplat.model.schema import Carry

ALL = [record() for record in codecs.CODECS.values()]
NAMES = list(codecs.CODECS)


def an_update(carry: Carry = "max", size: int = 70_000) -> Parameters:
    rng = np.random.default_rng(1)
    return Parameters.from_arrays(
        {
            "weight": rng.normal(size=size).astype("f4"),
            "half": rng.normal(size=300).astype("f2"),
            "steps": np.arange(5),
            "flags": np.array([True, False]),
        },
        carry,
    )


def encoded(format: Format, update: Parameters, seed: int = 2) -> bytes:
    return b"".join(format.encode(update, np.random.default_rng(seed)))


@pytest.mark.parametrize("options", ALL, ids=NAMES)
@pytest.mark.parametrize("carry", ["keep", "max"])
def test_a_file_is_read_back_as_the_codec_decodes_it(options: codecs.CodecOptions, carry: Carry) -> None:
    update = an_update(carry)
    format = Format(options, update.schema)
    content = encoded(format, update)
    assert encoded(format, update) == content
    assert len(content) <= format.max_bytes
    decoded = format.decode(content)
    assert decoded.schema == update.schema
    codec = options.build()
    payload = b"".join(codec.encode(update.to_blocks(), np.random.default_rng(2)))
    expected = [block.copy() for block in codec.decode(payload, update.schema.num_floating)]
    for _ in range(2):  # blocks can be read repeatedly
        np.testing.assert_array_equal(np.concatenate([b.copy() for b in decoded.to_blocks()]), np.concatenate(expected))
    carried = len(content) - len(format.prefix) - len(payload)
    assert carried == (5 * 8 + 2 if carry == "max" else 0)
    if carry == "max":
        for run in (run for run in update.schema.segments if run.dtype in ("I64", "BOOL")):
            np.testing.assert_array_equal(np.concatenate(list(decoded.read_carried(run))), update.segment(run))


@pytest.mark.parametrize("options", ALL, ids=NAMES)
def test_whatever_has_another_length_is_refused(options: codecs.CodecOptions) -> None:
    update = an_update()
    format = Format(options, update.schema)
    content = encoded(format, update)
    for bad in (content[:-1], content + b"\0", content[:-42], content[: len(format.prefix)], content + bytes(10**6)):
        with pytest.raises((CodecError, ModelError)):
            for _ in format.decode(bad).to_blocks():
                pass


def test_a_file_that_is_for_something_else_is_refused_in_words() -> None:
    update = an_update(size=10)
    format = Format(codecs.Bf16(), update.schema)
    content = encoded(format, update)
    other = Parameters.from_arrays({"weight": np.zeros(10, "f4")})
    cases = {
        "is not encoded as this version": update.to_bytes(),
        "is not encoded": b"",
        "belongs to other tensors": encoded(Format(codecs.Bf16(), other.schema), other),
        'encoded with \'{"codec":"bf61"': content.replace(b'"bf16"', b'"bf61"'),
        r"encoded with '\ufffd\x1b": content.replace(b'{"', b"\xff\x1b"),
        "ends within its first lines": content[: len(format.prefix) - 1],
        "expected 309 or more": content[: len(format.prefix) + 3],
    }
    for words, bad in cases.items():
        with pytest.raises(ModelError) as caught:
            format.decode(bad)
        assert words.replace("309", str(len(format.prefix) + 42)) in str(caught.value)


def test_what_is_not_finite_cannot_be_encoded() -> None:
    update = Parameters.from_arrays({"weight": np.array([1, np.nan], "f4")})
    with pytest.raises(CodecError, match="NaN or infinite"):
        encoded(Format(codecs.Bf16(), update.schema), update)


@pytest.mark.parametrize("options", ALL, ids=NAMES)
def test_options_are_text_and_back(options: codecs.CodecOptions) -> None:
    text = options_to_text(options)
    assert "\n" not in text
    assert options_from_text(text) == options


@pytest.mark.parametrize("text", ["", "bf16", '{"codec":"x"}', '{"codec":"bf16","bits":4}', "[]", "\ud800"])
def test_unknown_options(text: str) -> None:
    with pytest.raises(CodecError, match=r"supported codecs: .*bf16"):
        options_from_text(text)


def test_what_was_read_of_a_file_does_not_stay_in_memory(tmp_path: Path) -> None:
    def file_pages() -> int:
        [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssFile:")]
        return int(line.split()[1]) * 1024

    update = Parameters.from_arrays({"w": np.ones(200 * BLOCK, np.float32)})
    format = Format(codecs.Bf16(), update.schema)
    (tmp_path / "update").write_bytes(b"".join(format.encode(update, np.random.default_rng(1))))
    opened = format.open(tmp_path / "update")
    before = file_pages()
    for _ in range(2):
        assert sum(float(block.sum()) for block in opened.to_blocks()) == 200 * BLOCK
    assert file_pages() - before < 8 * 2**20 < (tmp_path / "update").stat().st_size
