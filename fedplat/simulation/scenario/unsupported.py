"""What a job may ask of a server and no simulation can do."""

from __future__ import annotations

from fedplat.errors import JobFileError
from fedplat.job import JobSpec


def check(spec: JobSpec) -> None:
    """Raises `JobFileError` for a job that is trained on the server's own data. Ranks change no result: no matter."""
    asked = {"warm_start": spec.warm_start, "server_step": spec.server_step}
    if found := [f"[{name}]" for name, table in asked.items() if table is not None]:
        raise JobFileError(
            f"{' and '.join(found)}: a simulation has no server that trains on data of its own; leave the table out, "
            "and begin with a model that was trained before (model.initial = a .safetensors file)"
        )
