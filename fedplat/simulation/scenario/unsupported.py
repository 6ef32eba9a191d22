"""Job options that only a server supports."""

from __future__ import annotations

from fedplat.errors import JobFileError
from fedplat.job import JobSpec


def check(spec: JobSpec) -> None:
    """Raise `JobFileError` for a job that trains on the server's data, or that a Flower app runs.

    `[pool]` is ignored: it changes no result.
    """
    if spec.flower is not None:
        raise JobFileError("flower: a Flower app is simulated from its folder; run fedplat flower run APP_DIR")
    tables = {"warm_start": spec.warm_start, "server_step": spec.server_step}
    if unsupported := [f"[{name}]" for name, table in tables.items() if table is not None]:
        raise JobFileError(
            f"{' and '.join(unsupported)}: a simulation has no server to train on its own data; leave the table out, "
            "and begin with a model that was trained before (model.initial = a .safetensors file)"
        )
