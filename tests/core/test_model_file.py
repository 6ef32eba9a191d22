"""Model files: the safetensors library is the oracle, both ways; hostile files are refused cheaply."""

from __future__ import annotations

import contextlib
import json
import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedplat.errors import ModelError
from fedplat.model import DTYPES, Parameters, Schema, TensorSpec
from fedplat.model import schema as schema_module

MiB = 2**20


def file_of(header: object, body: bytes = b"") -> bytes:
    """A file with any header: text as it is, anything else as JSON."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def entry(shape: list[Any], start: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def arrays() -> dict[str, npt.NDArray[Any]]:
    rng = np.random.default_rng(0)
    return {
        "z.counter": np.array(7, np.int64),
        "b": rng.normal(size=(2, 3)).astype(np.float32),
        "flag": np.array([True, False]),
        "a": rng.normal(size=4).astype(np.float32),
        "half": rng.normal(size=3).astype(np.float16),
        "empty": np.zeros((2, 0), np.float64),
        "u": np.array([255], np.uint8),
    }


def assert_same(actual: Any, expected: Any) -> None:
    assert set(actual) == set(expected)
    for name in expected:
        assert actual[name].dtype == expected[name].dtype
        assert actual[name].shape == expected[name].shape
        assert actual[name].tobytes() == expected[name].tobytes()


def test_the_library_reads_our_file():
    assert_same(safetensors.numpy.load(Parameters.from_arrays(arrays()).to_bytes()), arrays())


def test_we_read_the_librarys_file():
    parameters = Parameters.from_bytes(safetensors.numpy.save(arrays(), metadata={"format": "np"}))
    assert_same(parameters, arrays())
    assert parameters.schema.carry == "keep"


def test_bfloat16_through_torch_both_ways():
    tensors = {"w": torch.randn(3, 5, dtype=torch.bfloat16), "c": torch.tensor(3), "v": torch.randn(2)}
    parameters = Parameters.from_bytes(safetensors.torch.save(tensors))
    assert parameters["w"].dtype == ml_dtypes.bfloat16
    assert parameters["w"].astype(np.float32).tolist() == tensors["w"].float().tolist()
    back = safetensors.torch.load(parameters.to_bytes())
    assert all(torch.equal(back[name], tensors[name]) for name in tensors)


def test_every_dtype_is_the_librarys():
    values = {name: np.zeros(3, dtype) for name, dtype in DTYPES.items()}
    loaded = safetensors.torch.load(Parameters.from_arrays(values).to_bytes())
    assert {name: tensor.element_size() for name, tensor in loaded.items()} == {
        name: dtype.itemsize for name, dtype in DTYPES.items()
    }


def test_a_foreign_order_is_laid_out_in_ours():
    # uint8 first: the float32 is neither in its canonical place nor aligned.
    header = {"byte": entry([3], 0, 3, "U8"), "w": entry([2], 3, 11)}
    body = bytes([1, 2, 3]) + np.array([5, 6], np.float32).tobytes()
    parameters = Parameters.from_bytes(file_of(header, body))
    assert list(parameters) == ["w", "byte"]
    assert parameters["w"].tolist() == [5, 6]
    assert parameters["byte"].tolist() == [1, 2, 3]
    assert Parameters.from_bytes(parameters.to_bytes()) == parameters


def test_the_order_of_the_bytes_counts_not_that_of_the_header():
    header = {"second": entry([1], 4, 8), "first": entry([1], 0, 4)}
    parameters = Parameters.from_bytes(file_of(header, np.array([1, 2], np.float32).tobytes()))
    assert list(parameters) == ["first", "second"]
    assert parameters.to_vector().tolist() == [1, 2]


@pytest.mark.parametrize("spaces", range(8))
def test_views_are_aligned_whatever_the_length_of_the_header(spaces: int):
    text = json.dumps({"w": entry([2], 0, 16, "F64")}).encode() + b" " * spaces
    parameters = Parameters.from_bytes(file_of(text, np.array([1.5, 2.5]).tobytes()))
    assert parameters["w"].flags.aligned
    assert parameters["w"].tolist() == [1.5, 2.5]


def test_our_file_is_read_without_a_copy_and_read_only():
    data = Parameters.from_arrays(arrays()).to_bytes()
    parameters = Parameters.from_bytes(data)
    assert np.shares_memory(parameters.buffer, np.frombuffer(data, np.uint8))
    with pytest.raises(ValueError, match="read-only"):
        parameters["a"][0] = 1
    copy = parameters.copy()
    copy["a"][0] = 1
    assert copy != parameters
    for same in (bytearray(data), memoryview(data), np.frombuffer(data, np.uint8)):
        assert Parameters.from_bytes(same) == parameters


def test_files_of_equal_schema_have_equal_headers():
    first, second = (Parameters.from_arrays({"w": np.full(3, value, np.float32)}) for value in (1, 2))
    size = len(first.schema.header)
    assert size % 8 == 0
    assert first.to_bytes()[:size] == second.to_bytes()[:size] == first.schema.header
    assert len(first.to_bytes()) == first.schema.file_size_bytes


@pytest.mark.parametrize("carry", ["keep", "max"])
def test_the_carry_rule_is_kept_in_the_file(carry: Any):
    assert Parameters.from_bytes(Parameters.from_arrays(arrays(), carry).to_bytes()).schema.carry == carry


def test_open_maps_the_file(tmp_path: Path):
    path = tmp_path / "model.safetensors"
    parameters = Parameters.from_arrays({"w": np.zeros(MiB, np.float32)})
    path.write_bytes(parameters.to_bytes())
    tracemalloc.start()
    try:
        mapped = Parameters.open(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < MiB
    assert mapped == parameters
    assert not mapped.buffer.flags.writeable
    assert type(mapped.plus(np.ones(MiB, np.float32)).buffer) is np.ndarray


def test_open_tells_a_missing_file_from_a_bad_one(tmp_path: Path):
    with pytest.raises(FileNotFoundError):
        Parameters.open(tmp_path / "none")
    for content in (b"", b"1234567", b"12345678", b"\x02" + bytes(7) + b"{}1"):
        (tmp_path / "bad").write_bytes(content)
        with pytest.raises(ModelError):
            Parameters.open(tmp_path / "bad")


GOOD = {"w": entry([2], 0, 8)}
DEEP = b"[" * 100_000 + b"]" * 100_000
EMPTY_TENSOR = '"%d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
HOSTILE: dict[str, bytes] = {
    "nothing": b"",
    "a prefix cut short": b"\x02\x00\x00",
    "a huge header length": b"\xff" * 8 + b"{}",
    "a header longer than the file": (1000).to_bytes(8, "little") + b"{}",
    "a header at the limit": (16 * MiB).to_bytes(8, "little") + b"{}",
    "no JSON": file_of(b"nonsense"),
    "an empty header": file_of(b""),
    "JSON cut short": file_of(b'{"w":{"dtype":"F32"'),
    "two documents": file_of(b"{}{}"),
    "a list": file_of([]),
    "null": file_of(b"null"),
    "not UTF-8": file_of(b'{"\xff\xfe":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}', bytes(8)),
    "a lone surrogate": file_of(b'{"\\ud800":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}', bytes(8)),
    "UTF-16": file_of(json.dumps(GOOD).encode("utf-16"), bytes(8)),
    "a name twice": file_of(
        b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
        bytes(8),
    ),
    "a name twice, once escaped": file_of(
        b'{"w:":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},'
        b'"w\\u003a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
        bytes(8),
    ),
    "a key of an entry twice": file_of(
        b'{"w":{"dtype":"F64","dtype":"F32","shape":[2],"data_offsets":[0,8]}}', bytes(8)
    ),
    "metadata twice": file_of(
        b'{"__metadata__":{},"__metadata__":{"a":"b"},"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
        bytes(8),
    ),
    "a carry rule twice": file_of(b'{"__metadata__":{"fedplat.carry":"keep","fedplat.carry":"max"}}'),
    "deep JSON": file_of(DEEP),
    "deep JSON in an entry": file_of(b'{"w":' + DEEP + b"}"),
    "deep JSON in a shape": file_of(b'{"w":{"dtype":"F32","data_offsets":[0,8],"shape":' + DEEP + b"}}"),
    "deep JSON in the metadata": file_of(b'{"__metadata__":{"a":' + DEEP + b"}}"),
    "metadata that is no text": file_of({"__metadata__": {"a": 1}, **GOOD}, bytes(8)),
    "an unknown carry rule": file_of({"__metadata__": {"fedplat.carry": "min"}, **GOOD}, bytes(8)),
    "an unknown dtype": file_of({"w": entry([2], 0, 8, "F42")}, bytes(8)),
    "a missing field": file_of({"w": {"dtype": "F32", "shape": [2]}}, bytes(8)),
    "an unknown field": file_of({"w": {**GOOD["w"], "more": 1}}, bytes(8)),
    "an unnamed tensor": file_of({"": GOOD["w"]}, bytes(8)),
    "2^60 elements, no bytes": file_of({"w": entry([2**60], 0, 8)}, bytes(8)),
    "2^60 elements, offsets to match": file_of({"w": entry([2**60], 0, 2**62)}, bytes(8)),
    "2^64 elements by overflow": file_of({"w": entry([2**32, 2**32], 0, 0)}),
    "an extent of 2^70": file_of({"w": entry([2**70], 0, 8)}, bytes(8)),
    "an empty tensor of 2^62 columns": file_of({"w": entry([0, 2**62], 0, 0)}),
    "an empty tensor of 2^70 columns": file_of({"w": entry([0, 2**70], 0, 0)}),
    "an extent of 10^5000": file_of(b'{"w":{"dtype":"F32","shape":[1' + b"0" * 5000 + b'],"data_offsets":[0,8]}}'),
    "a negative extent": file_of({"w": entry([-2], 0, 8)}, bytes(8)),
    "two negative extents": file_of({"w": entry([-2, -1], 0, 8)}, bytes(8)),
    "a fractional extent": file_of({"w": entry([2.5], 0, 10)}, bytes(10)),
    "a boolean extent": file_of({"w": entry([True], 0, 4)}, bytes(4)),
    "a rank of 33": file_of({"w": entry([1] * 33, 0, 4)}, bytes(4)),
    "three offsets": file_of({"w": {**GOOD["w"], "data_offsets": [0, 8, 8]}}, bytes(8)),
    "negative offsets": file_of({"w": entry([2], -8, 0)}, bytes(8)),
    "offsets backwards": file_of({"w": entry([2], 8, 0)}, bytes(8)),
    "overlapping tensors": file_of({"a": entry([2], 0, 8), "b": entry([2], 4, 12)}, bytes(12)),
    "the same bytes twice": file_of({"a": entry([2], 0, 8), "b": entry([2], 0, 8)}, bytes(8)),
    "a gap between tensors": file_of({"a": entry([1], 0, 4), "b": entry([1], 8, 12)}, bytes(12)),
    "a gap at the beginning": file_of({"w": entry([2], 4, 12)}, bytes(12)),
    "bytes left over": file_of(GOOD, bytes(9)),
    "a body cut short": file_of(GOOD, bytes(7)),
    "no body": file_of(GOOD),
    "a body for no tensor": file_of({}, bytes(1)),
    "a backslash at the end": file_of(b'{"w\\'),
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.fault("F22", "F23")
def test_hostile_files_are_refused_without_a_large_allocation(name: str):
    assert_refused(HOSTILE[name])


@pytest.mark.parametrize(
    ("begin", "count", "repeated", "end"),
    [
        pytest.param("{", 200_000, EMPTY_TENSOR + ",", EMPTY_TENSOR + "}", id="tensors", marks=pytest.mark.slow),
        pytest.param("{", 10**6, EMPTY_TENSOR + ",", EMPTY_TENSOR + "}", id="more tensors", marks=pytest.mark.slow),
        pytest.param("{", 10**6, '"%d":{},', '"w":{}}', id="empty entries", marks=pytest.mark.slow),
        pytest.param('{"w":[', 10**6, "0,", "0]}", id="numbers"),
        pytest.param('{"', 10**6, '\\"', "", id="escaped quotes"),
    ],
)
@pytest.mark.fault("F22", "F23")
def test_very_many_of_anything_are_refused_without_a_large_allocation(begin: str, count: int, repeated: str, end: str):
    middle = "".join(repeated % number if "%" in repeated else repeated for number in range(count))
    assert_refused(file_of(f"{begin}{middle}{end}".encode()))


def assert_refused(data: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ModelError):
            Parameters.from_bytes(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < MiB + 8 * len(data)


ENDLESS = {
    "an unknown field": file_of({"w": {**GOOD["w"], "\x1b[31m" * 2**18: 1}}, bytes(8)),
    "a name": file_of({"\x1b[31m" * 2**18: GOOD["w"]}, bytes(8)),
    "a dtype": file_of({"w": {**GOOD["w"], "dtype": "x" * 2**20}}, bytes(8)),
    "a number": file_of(b'{"w":{"dtype":"F32","shape":[' + b"9" * 4000 + b'],"data_offsets":[0,8]}}', bytes(8)),
    "a shorter number": file_of({"w": entry([10**1500], 0, 8)}, bytes(8)),
    "an offset": file_of({"w": entry([2], 10**1500, 8)}, bytes(8)),
    "a carry rule": file_of({"__metadata__": {"fedplat.carry": "x" * 2**20}, **GOOD}, bytes(8)),
    "a metadata value": file_of({"__metadata__": {"\x1b" * 2**20: 1}, **GOOD}, bytes(8)),
}


@pytest.mark.parametrize("name", ENDLESS)
@pytest.mark.fault("F46")
def test_what_a_file_says_is_quoted_shortly(name: str):
    with pytest.raises(ModelError) as caught:
        Parameters.from_bytes(ENDLESS[name])
    assert len(str(caught.value).encode()) < 1000
    assert str(caught.value).isprintable()


def test_names_of_a_thousand_bytes_are_the_longest():
    longest = "\N{SNOWMAN}" * 333 + "x"
    model = Parameters.from_arrays({longest: np.ones(1, np.float32)})
    assert_same(Parameters.from_bytes(model.to_bytes()), {longest: np.ones(1, np.float32)})
    with pytest.raises(ModelError, match="cannot be the name of a tensor; expected 1 to 1000 bytes"):
        Parameters.from_arrays({longest + "x": np.ones(1, np.float32)})


def test_the_limit_on_tensors_counts_tensors(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(schema_module, "MAX_TENSORS", 2)
    header = {f"tensor {i}": entry([1], 4 * i, 4 * i + 4) for i in range(3)}
    Parameters.from_bytes(file_of({name: header[name] for name in list(header)[:2]}, bytes(8)))
    with pytest.raises(ModelError, match="3 tensors; at most 2"):
        Parameters.from_bytes(file_of(header, bytes(12)))


def test_equal_headers_share_one_schema_and_not_their_bytes():
    first, second = (Parameters.from_arrays({"shared": np.full(3, value, np.float32)}) for value in (1, 2))
    one, two = Parameters.from_bytes(first.to_bytes()), Parameters.from_bytes(second.to_bytes())
    assert one.schema is two.schema
    assert (one["shared"].tolist(), two["shared"].tolist()) == ([1, 1, 1], [2, 2, 2])
    with pytest.raises(ModelError):  # the same header over another number of bytes
        Parameters.from_bytes(first.to_bytes() + b"\0")


def test_names_may_hold_what_json_is_made_of():
    names = ["a:b", '"', "\\", '\\":', "{", "}:{", "é", "😀", "a b", "\n", "\x00", "__metadata"]
    values = {name: np.array([index], np.float32) for index, name in enumerate(names)}
    parameters = Parameters.from_bytes(Parameters.from_arrays(values).to_bytes())
    assert_same(parameters, values)
    assert_same(safetensors.numpy.load(parameters.to_bytes()), values)


@pytest.mark.parametrize("array", [np.zeros(16, np.int8), np.zeros((2, 8), np.uint8), np.zeros(4, np.float32)])
def test_arrays_that_are_no_bytes_are_refused(array: Any):
    with pytest.raises(ModelError, match="expected a vector of uint8"):
        Parameters.from_bytes(array)


_NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8).filter(lambda name: name != "__metadata__")
_SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)
_SPECS = st.lists(
    st.builds(TensorSpec, _NAMES, st.sampled_from(sorted(DTYPES)), _SHAPES),
    max_size=6,
    unique_by=lambda spec: spec.name,
)


@settings(deadline=None, max_examples=50)
@given(specs=_SPECS, carry=st.sampled_from(["keep", "max"]), seed=st.integers(0, 2**32 - 1))
def test_any_model_survives_a_file(specs: list[TensorSpec], carry: Any, seed: int):
    schema = Schema(tuple(specs), carry)
    bits = np.random.default_rng(seed).integers(0, 2, schema.size_bytes, np.uint8)  # valid as booleans too
    parameters = Parameters(schema, bits)
    restored = Parameters.from_bytes(parameters.to_bytes())
    assert restored == parameters
    assert restored.to_bytes() == parameters.to_bytes()
    assert set(safetensors.torch.load(parameters.to_bytes())) == {spec.name for spec in specs}
    named = Parameters.from_arrays({spec.name: restored[spec.name] for spec in specs}, carry)
    assert named == parameters


@settings(deadline=None)
@given(data=st.binary(max_size=200))
@pytest.mark.fault("F23")
def test_random_bytes_raise_nothing_but_model_errors(data: bytes):
    for content in (data, file_of(data), file_of(data, data)):
        with contextlib.suppress(ModelError):
            Parameters.from_bytes(content)


@settings(deadline=None)
@given(st.data())
@pytest.mark.fault("F23")
def test_damaged_files_raise_nothing_but_model_errors(data: st.DataObject):
    content = bytearray(Parameters.from_arrays(arrays()).to_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(content) - 1))
        content[position] = data.draw(st.integers(0, 255))
    try:
        parameters = Parameters.from_bytes(bytes(content))
    except ModelError:
        return
    assert Parameters.from_bytes(parameters.to_bytes()).schema == parameters.schema


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)
_ENTRIES = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(sorted(DTYPES)) | _JSON,
        "shape": st.lists(st.integers(-1, 3) | st.sampled_from([2**31, 2**62, 2**64])) | _JSON,
        "data_offsets": st.tuples(st.integers(-1, 16), st.integers(-1, 16)) | _JSON,
    },
)


@settings(deadline=None)
@given(header=st.dictionaries(st.text(max_size=3) | st.just("__metadata__"), _ENTRIES | _JSON), size=st.integers(0, 16))
@pytest.mark.fault("F23")
def test_any_json_header_raises_nothing_but_model_errors(header: dict[str, Any], size: int):
    with contextlib.suppress(ModelError):
        Parameters.from_bytes(file_of(msgspec.json.encode(header), bytes(size)))
