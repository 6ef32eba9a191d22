"""What a reply's arrays claim to be is compared with what they are, before the reply counts."""

from __future__ import annotations

import io
import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from fedplat import report_validation
from fedplat.errors import FlowerError
from fedplat.flower import layout, records
from fedplat.flower.records import INDEX, MessageFile
from fedplat.model import Parameters
from fedplat.rounds import Verdict
from fedplat.rounds.states import Reason

REAL = np.arange(6, dtype="<f4").reshape(2, 3)


def npy(values: npt.NDArray[Any], *, pickled: bool = False) -> bytes:
    out = io.BytesIO()
    np.save(out, values, allow_pickle=pickled)
    return out.getvalue()


def forged(header: str, body: bytes = b"") -> bytes:
    """Return an array with any header."""
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + body


def reply(
    content: bytes, dtype: str = "float32", shape: tuple[int, ...] = (2, 3), stype: str = "numpy.ndarray"
) -> Parameters:
    """Return the file of a reply whose array is serialized, as a client writes it that trusts no one's checks."""
    entry = layout.ArrayEntry("w", "w", stype, dtype, shape)
    index = layout.Index((layout.RecordEntry("arrays", "arrays", (entry,)),))
    tensors = {"w": np.frombuffer(content, np.uint8), INDEX: np.frombuffer(msgspec.msgpack.encode(index), np.uint8)}
    return Parameters.from_arrays(tensors)


def validate(file: Parameters, folder: Path, **options: Any) -> float | Verdict:
    path = folder / "update"
    path.write_bytes(file.to_bytes())
    return report_validation.validate_message(path, **options)


MAX_HEADER = "{'descr': '<f4', 'fortran_order': False, 'shape': (4000000000000,), }"
BAD: dict[str, tuple[Parameters, str]] = {
    "no npy": (reply(b"nothing of the kind"), "not in the file format of numpy.save"),
    "nothing": (reply(b""), "not in the file format"),
    "another shape inside": (reply(npy(REAL.T)), "has float32 of shape [3, 2]"),
    "another dtype inside": (reply(npy(REAL.astype("f8"))), "has float64 of shape [2, 3]"),
    "fewer values": (reply(npy(REAL)[:-4]), "does not have 20 bytes"),
    "more values": (reply(npy(REAL) + bytes(4)), "does not have 28 bytes"),
    "a huge array": (reply(forged(MAX_HEADER), shape=(4 * 10**12,)), "does not have 0 bytes"),
    "a huge array of the old API": (reply(forged(MAX_HEADER), "", ()), "does not have 0 bytes"),
    "a pickle": (reply(npy(np.array([{}]), pickled=True), "object", (1,)), "an array of Python objects"),
    "a record type": (reply(npy(np.zeros(2, "f4,f4")), "", ()), "an array of Python objects or records"),
    "a deep header": (reply(forged("(" * 1000)), "its header is not that of numpy.save"),
    "a long header": (reply(forged("1" * 60_000)), "its header ends after"),
    "an unknown dtype": (reply(forged("{'descr': '<f3', 'fortran_order': False, 'shape': (0,)}"), "", ()), "f3"),
    "a negative shape": (reply(forged("{'descr': '<f4', 'fortran_order': False, 'shape': (-1,)}"), "", ()), "no shape"),
    "an unknown type": (reply(npy(REAL), stype="pickle"), "serialized as 'pickle'; expected numpy.ndarray"),
    "trees of the old API": (reply(b"{}", "", (), ""), "or a type that flower.array_types names"),
}


@pytest.mark.parametrize("name", BAD)
def test_an_array_that_is_not_what_it_claims_to_be_is_refused(name: str, tmp_path: Path) -> None:
    file, text = BAD[name]
    tracemalloc.start()
    found = validate(file, tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert isinstance(found, Verdict)
    assert found.reason is Reason.REJECTED_SCHEMA
    assert text in found.text
    assert "\n" not in found.text
    assert peak < 2 * 2**20
    if "type" not in name and "trees" not in name:
        with pytest.raises(FlowerError, match="cannot be read"):
            records.decode(file)


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", ">f4", "c8", "c16", ml_dtypes.bfloat16])
@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_numbers_in_serialized_arrays_are_seen(dtype: npt.DTypeLike, number: float, tmp_path: Path) -> None:
    for values in (np.array([1, 2], dtype), np.array([1, number], dtype)):
        found = validate(reply(npy(values), str(values.dtype), (2,)), tmp_path)
        assert found == (0.0 if np.isfinite(values).all() else Verdict(Reason.REJECTED_NONFINITE))


def test_numbers_after_the_first_window_are_seen(tmp_path: Path) -> None:
    values = np.zeros(600_000, "<f8")
    values[-1] = np.nan
    assert validate(reply(npy(values), "", ()), tmp_path) == Verdict(Reason.REJECTED_NONFINITE)


@pytest.mark.parametrize(
    "values", [REAL, REAL.T, REAL.astype(">f4"), np.array(["a", "bc"]), np.zeros((0, 3)), np.array(2.5), np.array(True)]
)
def test_real_arrays_are_accepted(values: npt.NDArray[Any], tmp_path: Path) -> None:
    for dtype, shape in ((str(values.dtype), values.shape), ("", ())):
        file = reply(npy(values), dtype, shape)
        assert validate(file, tmp_path) == 0.0
        np.testing.assert_array_equal(
            records.decode(file).content.array_records["arrays"]["w"].numpy(), values, strict=True
        )


def test_an_app_can_allow_its_own_serialization(tmp_path: Path) -> None:
    assert validate(reply(b"{}", "", (), ""), tmp_path, array_types=("",)) == 0.0


def test_a_client_is_told_before_it_sends() -> None:
    for array, text in (
        (Array("float32", (3,), "numpy.ndarray", npy(REAL)), "cannot be sent: it claims to be 'float32'"),
        (Array("", (), "numpy.ndarray", b"trees"), "not in the file format of numpy.save"),
    ):
        with pytest.raises(FlowerError, match=text):
            records.encode(MessageFile(RecordDict({"arrays": ArrayRecord({"w": array})})))


def test_numbers_in_arrays_of_the_old_api_are_seen() -> None:
    array = Array("", (), "numpy.ndarray", npy(np.array([1, np.nan])))
    assert records.pack(MessageFile(RecordDict({"arrays": ArrayRecord({"w": array})}))).find_nonfinite() == "w"


def test_an_index_of_too_many_values_is_refused_without_making_them() -> None:
    index = msgspec.msgpack.encode([[["m", "metrics", [], {f"{key:x}": 1 for key in range(300_000)}]]])
    file = Parameters.from_arrays({INDEX: np.frombuffer(index, np.uint8)})
    tracemalloc.start()
    with pytest.raises(FlowerError, match="more than 100000 keys and values"):
        records.decode(file)
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()
    with pytest.raises(FlowerError, match="send large values as arrays"):
        records.encode(MessageFile(RecordDict({"m": MetricRecord({"list": list(range(100_001))})})))


TOKENS: list[Any] = [
    *(None, True, False, 0, 127, 128, 2**8, 2**16, 2**32, 2**64 - 1, -1, -32, -33, -(2**7) - 1, -(2**15) - 1, -(2**63)),
    *(0.5, "", "x" * 31, "x" * 32, "x" * 256, "x" * 2**16, b"", bytes(255), bytes(256), bytes(2**16)),
    *([], [1] * 15, [1] * 16, [1] * 2**16, {}, {str(key): [key, {}] for key in range(16)}),
    {str(key): key for key in range(2**16)},
]
"""A value of each head of MessagePack that fedplat writes."""


def count(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + sum(count(key) + count(each) for key, each in value.items())
    return 1 + sum(map(count, value)) if isinstance(value, list) else 1


def test_values_are_counted_as_msgpack_has_them() -> None:
    content = memoryview(msgspec.msgpack.encode(TOKENS))
    number = count(TOKENS)
    assert layout.has_few_values(content, 0, number)
    assert not layout.has_few_values(content, 0, number - 1)


def test_a_model_of_many_arrays_is_no_index_of_too_many_values() -> None:
    number = np.zeros((), np.float32)
    arrays = records.share_arrays({f"layer.{key}": number for key in range(20_000)})
    file = records.encode(MessageFile(RecordDict({"arrays": arrays})))
    assert len(records.decode(file).content.array_records["arrays"]) == 20_000


def test_bytes_of_a_config_may_be_large() -> None:
    content = RecordDict({"c": ConfigRecord({"masked": [bytes(2**20), bytes(2**20)]})})
    assert records.decode(records.encode(MessageFile(content))).content["c"] == content["c"]
