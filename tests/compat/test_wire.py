"""The protocol of this version beside that of each release, compared by `buf breaking`."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from google.protobuf import descriptor_pb2
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto, FileDescriptorSet

from support import releases
from support.releases import MAIN

pytestmark = [pytest.mark.slow, pytest.mark.fault("F28")]
SCRIPT = Path(__file__).parent / "descriptors.py"
RULES = [
    "WIRE_JSON",  # fields: number, type, label, name; a deleted field or value is reserved; packages
    "ENUM_NO_DELETE",
    "MESSAGE_NO_DELETE",
    "RPC_NO_DELETE",
    "SERVICE_NO_DELETE",
]
"""What breaks programs of another release: its bytes, its JSON (`fedplat --json`), and the calls that it makes."""
CONFIG = json.dumps({"version": "v2", "breaking": {"use": RULES}})


def describe(release: releases.Release, path: Path) -> FileDescriptorSet:
    release.run("python", "-P", str(SCRIPT), str(path))
    return FileDescriptorSet.FromString(path.read_bytes())


def find_breakages(old: FileDescriptorSet, new: FileDescriptorSet, folder: Path) -> list[dict[str, Any]]:
    """The findings of `buf breaking`, which reads nothing but two files."""
    for name, files in (("old", old), ("new", new)):
        (folder / f"{name}.binpb").write_bytes(files.SerializeToString())
    command = [str(MAIN.bin / "buf"), "breaking", "new.binpb", "--against", "old.binpb"]
    command += ["--error-format", "json", "--config", CONFIG]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 100), done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_the_protocol_only_grows(release: releases.Release, tmp_path: Path) -> None:
    old, new = describe(release, tmp_path / "release"), describe(MAIN, tmp_path / "main")
    assert len([file for file in old.file if file.package == "fedplat.wire.v1"]) > 3
    assert find_breakages(old, new, tmp_path) == []


def _file(files: FileDescriptorSet, name: str) -> FileDescriptorProto:
    return next(file for file in files.file if file.name.endswith(f"/{name}.proto"))


def _message(files: FileDescriptorSet, name: str = "Assignment") -> DescriptorProto:
    return next(each for each in _file(files, "fleet").message_type if each.name == name)


def _field(files: FileDescriptorSet) -> FieldDescriptorProto:
    return next(each for each in _message(files).field if each.name == "token")


def _change(**values: object) -> Callable[[FileDescriptorSet], None]:
    def change(files: FileDescriptorSet) -> None:
        field = _field(files)
        for name, value in values.items():
            setattr(field, name, value)

    return change


def _delete_field(files: FileDescriptorSet) -> None:
    _message(files).field.remove(_field(files))


def _delete_value(files: FileDescriptorSet) -> None:
    del _reasons(files).value[-1]


def _renumber_value(files: FileDescriptorSet) -> None:
    _reasons(files).value[-1].number = 999


def _reasons(files: FileDescriptorSet) -> descriptor_pb2.EnumDescriptorProto:
    return next(each for each in _file(files, "model").enum_type if each.name == "Reason")


def _delete_rpc(files: FileDescriptorSet) -> None:
    del _file(files, "fleet").service[0].method[0]


def _delete_service(files: FileDescriptorSet) -> None:
    del _file(files, "fleet").service[0]


def _change_answer(files: FileDescriptorSet) -> None:
    method = _file(files, "fleet").service[0].method[0]
    method.output_type = method.input_type


def _make_stream(files: FileDescriptorSet) -> None:
    _file(files, "fleet").service[0].method[0].server_streaming = True


def _rename_service(files: FileDescriptorSet) -> None:
    _file(files, "fleet").service[0].name = "Fleets"


TYPES = cast(Any, FieldDescriptorProto)
BREAKAGES: dict[str, tuple[Callable[[FileDescriptorSet], None], str]] = {
    "a field is deleted": (_delete_field, "FIELD_NO_DELETE_UNLESS_NUMBER_RESERVED"),
    "a field has another number": (_change(number=999), "FIELD_NO_DELETE_UNLESS_NUMBER_RESERVED"),
    "a field has another type": (_change(type=TYPES.TYPE_INT32), "FIELD_WIRE_JSON_COMPATIBLE_TYPE"),
    "a field has another label": (_change(label=TYPES.LABEL_REPEATED), "FIELD_WIRE_JSON_COMPATIBLE_CARDINALITY"),
    "a field has another name": (_change(name="secret", json_name="secret"), "FIELD_SAME_NAME"),
    "a value is deleted": (_delete_value, "ENUM_VALUE_NO_DELETE_UNLESS_NUMBER_RESERVED"),
    "a value has another number": (_renumber_value, "ENUM_VALUE_NO_DELETE_UNLESS_NUMBER_RESERVED"),
    "a call is deleted": (_delete_rpc, "RPC_NO_DELETE"),
    "a call has another answer": (_change_answer, "RPC_SAME_RESPONSE_TYPE"),
    "a call becomes a stream": (_make_stream, "RPC_SAME_SERVER_STREAMING"),
    "a service is deleted": (_delete_service, "SERVICE_NO_DELETE"),
    "a service has another name": (_rename_service, "SERVICE_NO_DELETE"),
}


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> FileDescriptorSet:
    return describe(MAIN, tmp_path_factory.mktemp("wire") / "main")


@pytest.mark.parametrize("name", BREAKAGES)
def test_a_breakage_is_found(ours: FileDescriptorSet, tmp_path: Path, name: str) -> None:
    change, rule = BREAKAGES[name]
    changed = FileDescriptorSet.FromString(ours.SerializeToString())
    change(changed)
    assert rule in {each["type"] for each in find_breakages(ours, changed, tmp_path)}


def test_a_field_may_be_deleted_if_its_number_is_reserved(ours: FileDescriptorSet, tmp_path: Path) -> None:
    changed = FileDescriptorSet.FromString(ours.SerializeToString())
    number = _field(changed).number
    _delete_field(changed)
    _message(changed).reserved_range.add(start=number, end=number + 1)
    _message(changed).reserved_name.append("token")
    assert find_breakages(ours, changed, tmp_path) == []
