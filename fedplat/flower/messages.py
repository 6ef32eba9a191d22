"""The messages between an ordinary job and a ClientApp: a model with the job's configuration, and the reply to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy.typing as npt
from flwr.app import ConfigRecord, RecordDict

from fedplat.errors import FlowerError
from fedplat.flower import records
from fedplat.flower.records import MessageFile
from fedplat.model import Parameters

NUM_EXAMPLES = "num-examples"
"""The metric that is the weight of a reply."""


def make_request(model: Parameters, config: Mapping[str, bool | int | float | str], message_type: str) -> Parameters:
    """Return the file of a message with a model and a configuration."""
    content = RecordDict({"arrays": records.share_arrays(model), "config": ConfigRecord({**config})})
    return records.encode(MessageFile(content, message_type))


def read_reply(content: RecordDict, name: str) -> tuple[Mapping[str, npt.NDArray[Any]] | None, dict[str, float]]:
    """Return the arrays of a reply, None if it has none, and its metrics that are numbers.

    `name` is that of the app. Raises `FlowerError` for a reply with several ArrayRecords or MetricRecords.
    """
    for kind, found in (("ArrayRecord", content.array_records), ("MetricRecord", content.metric_records)):
        if len(found) > 1:
            raise FlowerError(f"the ClientApp of {name} answered with {len(found)} {kind}s; expected one")
    arrays = next(iter(content.array_records.values()), None)
    metrics = next(iter(content.metric_records.values()), {})
    return (
        None if arrays is None else {key: array.numpy() for key, array in arrays.items()},
        {key: float(value) for key, value in metrics.items() if isinstance(value, int | float)},
    )
