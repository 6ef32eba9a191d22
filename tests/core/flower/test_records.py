"""Messages as files: every round trip is exact, and no hostile file does more than raise an error."""

from __future__ import annotations

import pickle
import tracemalloc
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from hypothesis import given
from hypothesis import strategies as st

from fedplat.errors import FlowerError, ModelError
from fedplat.flower import layout, records
from fedplat.flower.records import INDEX, FlatArray, MessageFile, decode, encode
from fedplat.model import Parameters

ARRAYS: dict[str, npt.NDArray[Any]] = {
    "float32": np.arange(6, dtype=np.float32).reshape(2, 3),
    "float64": np.array([1e300, -0.0]),
    "float16": np.array([0.5, 65504], np.float16),
    "int64": np.array([-(2**62), 3]),
    "uint8": np.arange(4, dtype=np.uint8),
    "bool": np.array([[True], [False]]),
    "no dimension": np.array(2.5, np.float32),
    "empty": np.zeros((0, 3), np.float32),
    "Fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "big-endian": np.arange(3, dtype=">f4"),
    "complex": np.array([1 + 2j]),
    "text": np.array(["a", "bc"]),
}


def there_and_back(content: RecordDict) -> RecordDict:
    """Send a message's content as the bytes of a file."""
    file = encode(MessageFile(content, "train", "3"))
    found = decode(Parameters.from_bytes(bytearray(file.to_bytes())))
    assert (found.message_type, found.group_id) == ("train", "3")
    return found.content


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_keep_their_bytes(name: str) -> None:
    sent = Array(ARRAYS[name])
    found = there_and_back(RecordDict({"arrays": ArrayRecord({"a": sent})})).array_records["arrays"]["a"]
    np.testing.assert_array_equal(found.numpy(), ARRAYS[name], strict=True)
    assert (found.dtype, tuple(found.shape), found.stype) == (sent.dtype, tuple(sent.shape), sent.stype)
    np.testing.assert_array_equal(Array(found.dtype, found.shape, found.stype, found.data).numpy(), ARRAYS[name])


@pytest.mark.parametrize("stype", ["", "xgboost"])
@pytest.mark.parametrize("data", [b"", b"{'trees': 3}", b"\x93NUMPY"])
def test_serialized_bytes_of_an_app_stay_as_they_are(stype: str, data: bytes) -> None:
    sent = Array("", (), stype, data)
    found = there_and_back(RecordDict({"parameters": ArrayRecord({"0": sent})})).array_records["parameters"]["0"]
    assert (found.data, found.stype, found.dtype, tuple(found.shape)) == (data, stype, "", ())


def test_bfloat16_arrays_keep_their_bytes() -> None:
    sent = Array(np.array([1.5, -2], ml_dtypes.bfloat16))
    found = there_and_back(RecordDict({"arrays": ArrayRecord({"a": sent})})).array_records["arrays"]["a"]
    assert (found.data, found.dtype, found.shape) == (sent.data, sent.dtype, sent.shape)


def test_arrays_are_views_of_the_file() -> None:
    file = encode(MessageFile(RecordDict({"arrays": ArrayRecord([np.zeros(3)])})))
    values = decode(file).content.array_records["arrays"]["0"].numpy()
    values[:] = 7
    assert file["0"].tolist() == [7, 7, 7]


def test_the_reply_of_an_app_that_echoes_its_message_is_a_copy() -> None:
    file = encode(MessageFile(RecordDict({"arrays": ArrayRecord([np.zeros(3)])})))
    copied = encode(decode(file))
    file["0"][:] = 1
    assert copied["0"].tolist() == [0, 0, 0]


def test_arrays_of_a_message_can_be_pickled() -> None:
    record = there_and_back(RecordDict({"arrays": ArrayRecord([np.arange(3.0)])})).array_records["arrays"]
    assert pickle.loads(pickle.dumps(record)).to_numpy_ndarrays()[0].tolist() == [0, 1, 2]


keys = st.text(max_size=12) | st.sampled_from(["__records__", "__metadata__", "a/b", "", "#1", "arrays/0", "\x00"])
numbers = st.integers(-(2**63), 2**63 - 1) | st.floats()
values = st.one_of(numbers, st.lists(st.integers(-(2**63), 2**63 - 1)), st.lists(st.floats()))
settings_ = st.one_of(values, st.text(), st.binary(), st.booleans(), st.lists(st.text()), st.lists(st.binary()))
arrays = st.sampled_from(list(ARRAYS.values())).map(Array)
contents = st.dictionaries(
    keys,
    st.one_of(
        st.dictionaries(keys, arrays, max_size=4).map(lambda found: ArrayRecord(dict(found))),
        st.dictionaries(keys, values, max_size=4).map(MetricRecord),
        st.dictionaries(keys, settings_, max_size=4).map(ConfigRecord),
    ),
    max_size=5,
)


@given(contents)
def test_any_content_comes_back_in_its_order(content: dict[str, Any]) -> None:
    sent = RecordDict(content)
    found = there_and_back(sent)
    assert list(found) == list(sent)
    for name, record in sent.items():
        assert type(found[name]) is type(record)
        assert list(found[name]) == list(record)
        if isinstance(record, ArrayRecord):
            arrived = found.array_records[name]
            assert [each.data for each in arrived.values()] == [each.data for each in record.values()]
        else:
            assert repr(dict(found[name])) == repr(dict(record))


def test_numpy_scalars_become_numbers() -> None:
    metrics = there_and_back(RecordDict({"m": MetricRecord({"loss": np.float64(0.5)})})).metric_records["m"]  # pyright: ignore
    assert type(metrics["loss"]) is float


def test_values_that_no_file_can_hold() -> None:
    with pytest.raises(FlowerError, match=r"cannot be sent"):
        encode(MessageFile(RecordDict({"m": MetricRecord({"n": 2**70})})))
    with pytest.raises(FlowerError, match=r"send large values as arrays"):
        encode(MessageFile(RecordDict({"c": ConfigRecord({"text": "x" * (layout.MAX_INDEX_BYTES + 1)})})))


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ml_dtypes.bfloat16])
def test_numbers_that_are_not_finite_are_found(dtype: npt.DTypeLike) -> None:
    good, bad = np.zeros(2, dtype), np.array([[1], [np.nan]], dtype)
    for arrays, found in (({"good": good, "bad": bad}, "bad"), ({"good": good, "count": np.arange(3)}, "")):
        file = records.pack(MessageFile(RecordDict({"arrays": records.share_arrays(arrays)})))
        assert file.find_nonfinite() == found


def test_a_packed_message_shares_memory_and_a_copy_does_not() -> None:
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    content = RecordDict({"arrays": records.share_arrays({"w": values.T, "n": np.arange(2)})})
    packed = records.pack(MessageFile(content, "train", "g"))
    own = packed.copy()
    assert own == packed
    assert b"".join(packed.pieces) == packed.to_bytes() == packed.to_parameters().to_bytes() == own.to_bytes()
    again = decode(Parameters.from_bytes(packed.to_bytes()))
    assert (again.message_type, again.group_id) == ("train", "g")
    np.testing.assert_array_equal(again.content.array_records["arrays"]["w"].numpy(), values.T)
    shared = records.pack(MessageFile(RecordDict({"arrays": records.share_arrays({"w": values})})))
    before = shared.copy()
    values[0, 0] = 9.0
    assert shared != before
    assert shared.content.array_records["arrays"]["w"].numpy()[0, 0] == 9.0


def hostile(index: object, **tensors: npt.NDArray[Any]) -> Parameters:
    """Return a file whose index is anything."""
    text = index if isinstance(index, bytes) else msgspec.msgpack.encode(index)
    return Parameters.from_arrays({**tensors, INDEX: np.frombuffer(text, np.uint8)})


DEEP = b"\x91" * 100_000
HOSTILE: dict[str, object] = {
    "no bytes": b"",
    "no MessagePack": b"\xc1",
    "a number": 3,
    "deep": DEEP,
    "a deep value": b"\x91\x91\x94\xa1m\xa7metrics\x90\x81\xa1a" + DEEP,
    "many records": [[["m", "metrics"]] * 10_001],
    "a long list": b"\x91\xdd\xff\xff\xff\xff",
    "a long text": b"\x91\x91\x92\xdb\xff\xff\xff\xff",
    "a long map": b"\x91\x91\x94\xa1m\xa7metrics\x90\xdf\xff\xff\xff\xff",
    "another kind": [[["m", "code"]]],
    "lists of lists": [[["c", "config", [], {"a": [[]] * 1000}]]],
    "a missing value": [[["c", "config", [], {"a": None}, {}]]],
    "text in metrics": [[["m", "metrics", [], {"a": "text"}]]],
    "two records of a name": [[["m", "metrics"], ["m", "metrics"]]],
    "a tensor that is not there": [[["a", "arrays", [["k", "x"]]]]],
    "the index as an array": [[["a", "arrays", [["k", INDEX]]]]],
    "a tensor twice": [[["a", "arrays", [["k", "t"], ["l", "t"]]]]],
    "a tensor in two records": [[["a", "arrays", [["k", "t"]]], ["b", "arrays", [["k", "t"]]]]],
    "a key twice": [[["a", "arrays", [["k", "t"], ["k", "u"]]]]],
    "numbers as bytes": [[["a", "arrays", [["k", "f", "numpy.ndarray", "float32", [2]]]]]],
    "no UTF-8": b"\x91\x91\x92\xa1\xff\xa7metrics",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused_cheaply(name: str) -> None:
    tensors = {"t": np.zeros(4, np.uint8), "u": np.zeros(4, np.uint8), "f": np.zeros(2, np.float32)}
    file = hostile(HOSTILE[name], **tensors)
    tracemalloc.start()
    with pytest.raises(FlowerError) as caught:
        decode(file)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20
    assert len(str(caught.value).splitlines()) == 1


def test_other_files_are_refused() -> None:
    for file in (
        Parameters.from_arrays({"a": np.zeros(3)}),
        Parameters.from_arrays({INDEX: np.zeros(3)}),
        Parameters.from_arrays({INDEX: np.zeros((2, 2), np.uint8)}),
    ):
        with pytest.raises(FlowerError, match=r"expected a tensor __records__ of bytes"):
            decode(file)


@given(st.binary(max_size=60), st.integers(0, 10_000))
def test_changed_bytes_raise_errors_of_fedplat_only(noise: bytes, place: int) -> None:
    content = RecordDict({"a": ArrayRecord([np.zeros(2)]), "m": MetricRecord({"n": 1}), "c": ConfigRecord({"b": b"x"})})
    file = bytearray(encode(MessageFile(content, "train")).to_bytes())
    place %= len(file)
    file[place : place + len(noise)] = noise
    try:
        decode(Parameters.from_bytes(file))
    except (FlowerError, ModelError):
        return


def test_arrays_know_their_fields() -> None:
    array = FlatArray(np.zeros((2, 3), np.float32))
    assert (array.dtype, array.shape, array.stype) == ("float32", (2, 3), "numpy.ndarray")
    assert array.data == Array(np.zeros((2, 3), np.float32)).data
