"""Copies of a tied weight in an initial model, which a job would make different."""

from __future__ import annotations

import re

import numpy as np

from fedplat import codecs
from fedplat.job.tables import JobTables
from fedplat.model import FLOATING, Parameters

_ALIKE = codecs.Plain | codecs.Bf16
"""Codecs that decode equal entries to equal ones."""
_MIN_ENTRIES = 64
"""Of matrices that are compared: smaller ones may be equal by chance."""


def describe_copies(spec: JobTables, model: Parameters) -> list[str]:
    """Return a warning if the initial model seems to have a tied weight twice, and the job would change each by itself.

    A file has no notes on tensors that are one in the module. Clients refuse the model as soon as these differ: after
    noise, or a codec that rounds or leaves out entries. Layers that begin as copies of one another are no tied weight:
    their names end alike, but for numbers.
    """
    found = _find_copies(model) if (cause := _cause(spec)) else None
    if found is None:
        return []
    first, other = found
    return [
        f"model.initial: {first!r} and {other!r} have the same values; if they are one tied weight, {cause} makes them "
        f"differ, and clients then refuse the model: leave {other!r} out of it, as fedplat.pytorch.convert."
        "from_state_dict(module.state_dict()) does"
    ]


def _cause(spec: JobTables) -> str:
    """Return what changes equal tensors differently; empty if nothing does."""
    if spec.privacy is not None:
        return "the noise of [privacy]"
    if spec.secure_aggregation is not None:
        return "the rounding of [secure_aggregation]"
    options = (spec.compression.uplink, spec.compression.downlink)
    return "the codec of [compression]" if any(not isinstance(each, _ALIKE | None) for each in options) else ""


def _find_copies(model: Parameters) -> tuple[str, str] | None:
    """Return the names of the first two equal matrices that may be one tied weight."""
    first: dict[tuple[str, tuple[int, ...], bytes], list[str]] = {}
    for tensor in model.schema.tensors:
        if tensor.dtype not in FLOATING or len(tensor.shape) < 2 or tensor.count < _MIN_ENTRIES:
            continue
        values = model[tensor.name]
        bits = np.ascontiguousarray(values.reshape(-1)[:_MIN_ENTRIES]).tobytes()
        for name in first.setdefault((tensor.dtype, tensor.shape, bits), []):
            if _may_be_tied(name, tensor.name) and np.array_equal(model[name], values) and values.min() != values.max():
                return name, tensor.name
        first[tensor.dtype, tensor.shape, bits].append(tensor.name)
    return None


def _may_be_tied(one: str, other: str) -> bool:
    """Return whether names may be those of one tensor: layers.0.linear.weight and layers.1.linear.weight are not."""
    ends = [re.sub(r"[0-9]+", "", ".".join(re.split(r"[./]", name)[-2:])) for name in (one, other)]
    return ends[0] != ends[1] or "embed" in ends[0].casefold()
