"""The numbers of a run as rows, and as a data frame (extra "notebook")."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fedplat.errors import MissingExtraError
from fedplat.extras import install_command
from fedplat.simulation.recording.result import AttemptResult, Result

if TYPE_CHECKING:
    from pandas import DataFrame

_COUNTS = ("MERGED", "LATE", "FAILED", "REJECTED", "SURPLUS", "DROPPED")


def list_rounds(result: Result) -> list[dict[str, Any]]:
    """Return one row for each committed round, in their order; a metric that a round does not have is missing.

    `at_s` and `duration_s` are virtual seconds: the end of the round, and the time since the previous one. `accuracy`
    and other plain names are scores on the central test data, `clients/NAME` the metrics that clients reported in
    training, and `federated/NAME` those of the federated evaluation of the round.
    """
    federated = {each.round: each.metrics for each in result.attempts if each.kind == "EVALUATE" and each.committed}
    abandoned: dict[int, int] = {}
    for each in result.attempts:
        if each.kind == "TRAIN" and not each.committed:
            abandoned[each.round] = abandoned.get(each.round, 0) + 1
    rows: list[dict[str, Any]] = []
    before = 0.0
    for record in result.rounds:
        row = _numbers(record) | {"duration_s": record.ended_at - before, "abandoned": abandoned.get(record.round, 0)}
        row |= dict(record.evaluation)
        row |= {f"clients/{name}": value for name, value in record.metrics.items()}
        row |= {f"federated/{name}": value for name, value in federated.get(record.round, {}).items()}
        rows.append(row)
        before = record.ended_at
    return rows


def _numbers(record: AttemptResult) -> dict[str, Any]:
    return {
        "round": record.round,
        "at_s": record.ended_at,
        "duration_s": 0.0,
        "version": record.version,
        "updates": record.num_updates,
        "weight": record.total_weight,
        "bytes_down": record.bytes_down,
        "bytes_up": record.bytes_up,
        **{name.lower(): record.counts.get(name, 0) for name in _COUNTS},
    }


def to_frame(rows: Sequence[Mapping[str, Any]]) -> DataFrame:
    """Return rows as a data frame. Raises `MissingExtraError` without pandas."""
    try:
        import pandas
    except ModuleNotFoundError as exc:
        raise MissingExtraError(f"data frames need pandas; install it with: {install_command('notebook')}") from exc
    return pandas.DataFrame.from_records([dict(row) for row in rows])
