"""Write the protocol of the fedplat that is imported as a FileDescriptorSet: `python -P descriptors.py FILE`."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from pathlib import Path

from google.protobuf import descriptor_pb2
from google.protobuf.descriptor import FileDescriptor

import fedplat.wire.v1 as package


def main() -> None:
    """Write all files of the protocol, each after those that it imports."""
    found = descriptor_pb2.FileDescriptorSet()
    added: set[str] = set()

    def add(file: FileDescriptor) -> None:
        if file.name in added:
            return
        added.add(file.name)
        for imported in file.dependencies:
            add(imported)
        file.CopyToProto(found.file.add())

    for module in sorted(each.name for each in pkgutil.iter_modules(package.__path__)):
        if module.endswith("_pb2"):
            add(importlib.import_module(f"{package.__name__}.{module}").DESCRIPTOR)
    Path(sys.argv[1]).write_bytes(found.SerializeToString())


if __name__ == "__main__":
    main()
