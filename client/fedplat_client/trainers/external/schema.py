"""Print the JSON Schema of `task.json` and `result.json`, which is docs/schema/task-folder.schema.json."""

from __future__ import annotations

import sys

import msgspec

from fedplat_client.trainers.external.folder import ProgramResult, TaskDescription


def format_schema() -> str:
    """Return the JSON Schema of `task.json` and `result.json`."""
    _, definitions = msgspec.json.schema_components((TaskDescription, ProgramResult), ref_template="#/$defs/{name}")
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Files of a task folder of fedplat, version 1",
        "oneOf": [{"$ref": f"#/$defs/{name}"} for name in sorted(definitions)],
        "$defs": definitions,
    }
    return msgspec.json.format(msgspec.json.encode(schema), indent=2).decode() + "\n"


if __name__ == "__main__":
    sys.stdout.write(format_schema())
