"""A procedure over tables of this process, as in a notebook: the same steps and sums as with real sites."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import cast

import msgspec
from msgspec import Struct

from fedplat import texts
from fedplat.errors import ProcedureError
from fedplat.procedures.contract import Finished, Json, Procedure, Step
from fedplat.procedures.sums import ExactSum, ReplyTotals
from fedplat.procedures.tables import SiteTable
from fedplat.tables.files import Frame

MAX_STEPS = 10_000


@dataclasses.dataclass(frozen=True)
class AskedStep:
    """A step, with the sums of the replies to it, and what the procedure returned for them."""

    step: Step
    totals: ReplyTotals
    outcome: Step | Finished


class ProcedureResult(Struct, frozen=True):
    """The result of a procedure, and how it was made."""

    sites: int
    steps: int
    result: dict[str, Json]
    files: dict[str, bytes] = {}

    def to_json(self) -> bytes:
        """Return all but the files as JSON; equal results have equal bytes."""
        return msgspec.json.encode({"sites": self.sites, "steps": self.steps, "result": self.result})


def run(
    procedure: Procedure, frames: Mapping[str, Frame | SiteTable], *, max_steps: int = MAX_STEPS
) -> ProcedureResult:
    """Run a procedure over the table of each site, by its name: a frame, the path of a file, or a `SiteTable`.

    No guarantee of privacy applies within one process.

    >>> columns = {"age": NumericColumn(low=0, high=120, resolution=1)}
    >>> run(Means(columns, min_rows=2), {"a": {"age": [41, 67]}, "b": {"age": [55]}}).result["columns"]["age"]["mean"]
    54.333333333333336

    Raises `ProcedureError` for a table that does not fit, with the name of its site, and if the procedure has not ended
    after `max_steps` questions.
    """
    if not isinstance(cast(object, frames), Mapping) or not frames:
        raise ProcedureError('expected the table of each site by its name, such as {"north": frame, "south": frame}')
    for number, asked in enumerate(ask(procedure, frames, max_steps), 1):
        if isinstance(asked.outcome, Finished):
            return ProcedureResult(len(frames), number, asked.outcome.result, asked.outcome.files)
    raise AssertionError("the last step has the result")


def ask(
    procedure: Procedure, frames: Mapping[str, Frame | SiteTable], max_steps: int = MAX_STEPS
) -> Iterator[AskedStep]:
    """Yield each step as it is answered; the last one has the result. Raises `ProcedureError` as `run` does."""
    tables = {name: open_table(frame) for name, frame in frames.items()}
    step = procedure.begin()
    for _ in range(max_steps):
        schema = procedure.schema(step.message)
        schema.check_sites(len(frames))
        total = ExactSum(schema)
        for name, table in tables.items():
            try:
                total.add(schema.encode(procedure.answer(step.message, table)))
            except ProcedureError as exc:
                raise ProcedureError(f"site {texts.quote(str(name))}: {exc}") from exc
        outcome = procedure.advance(step.state, total.totals)
        yield AskedStep(step, total.totals, outcome)
        if isinstance(outcome, Finished):
            return
        step = outcome
    raise ProcedureError(f"the procedure has not ended after {max_steps:,} steps; expected a result before")


def open_table(frame: Frame | SiteTable) -> SiteTable:
    """Return the table of a site. Raises `ProcedureError` and `MissingExtraError` as `SiteTable` does."""
    return frame if isinstance(frame, SiteTable) else SiteTable(frame)
