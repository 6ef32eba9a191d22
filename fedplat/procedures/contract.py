"""The contract of procedures: pure programs that ask all sites for exact sums, compute, and ask again.

A procedure is a frozen record of its options. Both of its halves are methods of it: that of the sites (`schema`,
`answer`) and that of the server, which adds up (`begin`, `advance`). A site has the options from the text that its
owner has read, so it computes the form of its reply itself, and a message only tells it which step it is at. Nothing is
kept between calls but `Step.state`, so a step that is repeated gives the same bits, and asks for the same sums.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, TypeAlias, runtime_checkable

import numpy.typing as npt
from msgspec import Struct

from fedplat.model import Parameters
from fedplat.procedures.sums import ReplySchema, ReplyTotals
from fedplat.procedures.tables import SiteTable

Json: TypeAlias = bool | int | float | str | list["Json"] | dict[str, "Json"] | None


class Step(Struct, frozen=True):
    """A question to all sites: `message` is public, `state` is what `advance` gets back with the sums."""

    message: Parameters
    state: bytes = b""


class Finished(Struct, frozen=True):
    """The end of a procedure: its public result, and files by their names."""

    result: dict[str, Json]
    files: dict[str, bytes] = {}


class ReplyDisclosure(Struct, frozen=True):
    """What leaves a site in one tensor of its replies, in words for its owner.

    The site sends `count` numbers from -`bound` to `bound`, in multiples of `step`, at most `times` times.
    """

    name: str
    content: str
    count: int
    bound: float
    step: float
    times: int

    def __str__(self) -> str:
        times = "once" if self.times == 1 else f"at most {self.times:,} times"
        numbers = f"{self.count:,} number{'' if self.count == 1 else 's'}"
        return f"{self.name}: {self.content}; {numbers} from {-self.bound:g} to {self.bound:g}, {times}"


@runtime_checkable
class Procedure(Protocol):
    """A program of steps; all methods are pure."""

    def begin(self) -> Step:
        """Return the first question."""
        ...

    def schema(self, message: Parameters) -> ReplySchema:
        """Return the form of the replies to a message, with the bounds of all numbers.

        Raises `ProcedureError` for a message that is not one of this procedure.
        """
        ...

    def answer(self, message: Parameters, table: SiteTable) -> Mapping[str, npt.ArrayLike]:
        """Return a site's reply, with the tensors of `schema`.

        Raises `ProcedureError` for data that does not fit the options; its text may leave the site, so it has names
        and counts, but no values.
        """
        ...

    def advance(self, state: bytes, totals: ReplyTotals) -> Step | Finished:
        """Return the next question, or the result; `totals` are the sums of the replies to the last one."""
        ...

    def disclosures(self) -> tuple[ReplyDisclosure, ...]:
        """Return what leaves a site, in all steps together."""
        ...


FEATURE = "procedure.1"
"""The part of the wire protocol that a client states if it answers procedures."""
METHODS = ("begin", "schema", "answer", "advance", "disclosures")
"""The names of the methods of a procedure."""


def version_of(procedure: Procedure | type[Struct]) -> int:
    """Return the version of a procedure or of its class, its attribute `version`; 1 without one.

    It grows when the same options mean other numbers: a server and a site with different ones do not work together.
    """
    return getattr(procedure, "version", 1)
