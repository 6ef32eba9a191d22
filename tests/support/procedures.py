"""A procedure of several steps for tests, tables for it, and clients that answer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from fedplat.errors import ProcedureError
from fedplat.model import Parameters
from fedplat.procedures import Finished, ReplyDisclosure, ReplySchema, ReplyTensor, ReplyTotals, SiteTable, Step
from fedplat_client import Client
from fedplat_client.trainers.table import TableTrainer
from support import clients
from support.daemons import Site

Frame = dict[str, npt.NDArray[np.float64]]


class _Range(Struct, frozen=True):
    low: float
    high: float
    left: int


class Halving(Struct, frozen=True):
    """Halves a range until `steps` are over, so that about half of the rows are below its middle; has a file, too."""

    version: ClassVar[int] = 1
    column: str
    high: float
    steps: int = 4

    def begin(self) -> Step:
        return self._ask(_Range(0.0, self.high, self.steps))

    def _ask(self, found: _Range) -> Step:
        message = Parameters.from_arrays({"middle": np.array([(found.low + found.high) / 2])})
        return Step(message, msgspec.json.encode(found))

    def schema(self, message: Parameters) -> ReplySchema:
        if {*message} != {"middle"}:
            raise ProcedureError("the message is not one of this procedure; expected a middle")
        return ReplySchema((ReplyTensor("below", bound=1e6), ReplyTensor("rows", bound=1e6)))

    def answer(self, message: Parameters, table: SiteTable) -> Mapping[str, npt.ArrayLike]:
        values = table.read(self.column)
        return {"below": int((values < message["middle"][0]).sum()), "rows": values.size}

    def advance(self, state: bytes, totals: ReplyTotals) -> Step | Finished:
        found = msgspec.json.decode(state, type=_Range)
        middle = (found.low + found.high) / 2
        if 2 * int(totals.steps("below")) > int(totals.steps("rows")):
            found = _Range(found.low, middle, found.left - 1)
        else:
            found = _Range(middle, found.high, found.left - 1)
        if found.left:
            return self._ask(found)
        return Finished({"low": found.low, "high": found.high}, {"range.csv": f"{found.low},{found.high}\n".encode()})

    def disclosures(self) -> tuple[ReplyDisclosure, ...]:
        below = "how many rows are below the middle of the range"
        return (
            ReplyDisclosure("below", below, count=1, bound=1e6, step=1.0, times=self.steps),
            ReplyDisclosure("rows", "the number of rows", count=1, bound=1e6, step=1.0, times=self.steps),
        )


def make_frames(num_sites: int, num_rows: int = 40) -> dict[str, Frame]:
    """The tables of sites, each with one row more than the one before."""
    rng = np.random.default_rng(7)
    return {
        f"site-{number}": {
            "age": rng.integers(18, 96, num_rows + number).astype(np.float64),
            "crp": np.round(rng.gamma(1.0, 20.0, num_rows + number), 1),
        }
        for number in range(num_sites)
    }


MEANS = """\
[procedure]
kind = "means"
[procedure.columns]
age = { low = 0, high = 120, resolution = 1 }
crp = { low = 0, high = 1000, resolution = 0.1 }
"""
HALVING = '[procedure]\nkind = "halving"\ncolumn = "age"\nhigh = 128.0\nsteps = 4\n'
PLUGINS = {"procedures.halving": "support.procedures:Halving"}


def procedure_job(procedure: str = MEANS, goal: int = 3, rounds: int = 4, more: str = "") -> str:
    """A job file with a procedure: deadlines are far away and pauses short, unless `more` has a table for them."""
    tables = "" if "[deadlines]" in more else "[deadlines]\ntraining_s = 3600.0\nselection_s = 3600.0\n"
    tables += "[retry]\nbase_s = 0.01\nmax_s = 0.01\n"
    head = f'name = "sums"\npopulation = "demo"\ntrainer = "patients"\nrounds = {rounds}\n'
    return f"{head}[selection]\ngoal = {goal}\n{tables}{procedure}{more}"


async def make_client(site: Site, folder: Path, frame: Frame) -> Client:
    """A client that answers from a table."""
    client = Client(
        site.address,
        population="demo",
        ticket=await site.operator.ticket(),
        data_dir=folder,
        plugins={"procedures.halving": Halving},
    )
    client.add_trainer("patients", TableTrainer(frame))
    return client


@contextlib.asynccontextmanager
async def at_work(made: Sequence[Client]) -> AsyncGenerator[None]:
    """Each client works in a thread until the end; the event loop, and a daemon on it, continues meanwhile."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(clients.at_work(made))
        try:
            yield
        finally:
            await asyncio.to_thread(stack.close)
