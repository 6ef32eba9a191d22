"""The vectors that a collective works on, with known numbers in them."""

from __future__ import annotations

import dataclasses

import torch
from torch import distributed

from fedplat.backends.ranks import Ranks

PERIOD = 1021
"""Entry i of rank r's vector is i mod 1021, plus r: a prime, so that no piece is like another, and sums are exact."""
ADDING = frozenset({"reduce", "reduce-scatter", "all-reduce"})


@dataclasses.dataclass(frozen=True)
class Area:
    """A rank's vectors for one size: what it `give`s, what it `take`s, and room to work in.

    Collectives that add find their input in `take`, and leave the result there, as those of nccl-tests in place.
    """

    ranks: Ranks
    give: torch.Tensor
    take: torch.Tensor
    scratch: torch.Tensor

    @property
    def count(self) -> int:
        """Entries of a vector: a multiple of the number of ranks."""
        return self.give.numel()

    def piece(self, rank: int) -> slice:
        """A rank's part of a vector."""
        length = self.count // self.ranks.size
        return slice(rank * length, (rank + 1) * length)

    @property
    def mine(self) -> slice:
        """This rank's part of a vector."""
        return self.piece(self.ranks.rank)

    def exchange(
        self,
        sends: list[tuple[torch.Tensor, int]] | None = None,
        receives: list[tuple[torch.Tensor, int]] | None = None,
    ) -> None:
        """Sends to some ranks and receives from some, at the same time."""
        operations = [distributed.P2POp(distributed.irecv, values, rank) for values, rank in receives or []]
        operations += [distributed.P2POp(distributed.isend, values, rank) for values, rank in sends or []]
        if operations:
            for work in distributed.batch_isend_irecv(operations):
                work.wait()

    def fill(self) -> None:
        """Puts this rank's numbers into `give`."""
        pattern(self.give, 0, 1.0, self.ranks.rank)

    def prepare(self, collective: str) -> None:
        """Makes `take` what it is before the collective: nothing of an earlier result is left in it."""
        self.take.zero_()
        if collective in ADDING:
            self.take.copy_(self.give)
        elif collective in ("all-gather", "gather"):
            self.take[self.mine] = self.give[self.mine]
        elif collective == "broadcast" and self.ranks.is_first:
            self.take.copy_(self.give)

    def is_correct(self, collective: str) -> bool:
        """Whether `take` has the result of the collective on this rank. Overwrites `scratch`."""
        ranks, first = self.ranks, self.ranks.is_first
        terms = (float(ranks.size), ranks.size * (ranks.size - 1) / 2)  # of sums
        expected: list[tuple[slice, int, float, float]] = []  # of which part: first entry, factor and summand
        everything = slice(0, self.count)
        if collective == "broadcast":
            expected = [(everything, 0, 1.0, 0.0)]
        elif collective == "scatter":
            expected = [(self.mine, self.mine.start, 1.0, 0.0)]
        elif collective == "all-gather" or (collective == "gather" and first):
            expected = [(self.piece(rank), self.piece(rank).start, 1.0, float(rank)) for rank in range(ranks.size)]
        elif collective == "all-to-all":
            expected = [(self.piece(rank), self.mine.start, 1.0, float(rank)) for rank in range(ranks.size)]
        elif collective == "reduce-scatter":
            expected = [(self.mine, self.mine.start, *terms)]
        elif collective == "all-reduce" or (collective == "reduce" and first):
            expected = [(everything, 0, *terms)]
        for part, begin, factor, summand in expected:
            pattern(self.scratch[part], begin, factor, summand)
            if not torch.equal(self.take[part], self.scratch[part]):
                return False
        return True


def pattern(values: torch.Tensor, first: int, factor: float, summand: float) -> None:
    """Fills a part of a vector that begins at entry `first`: (entry mod 1021) * factor + summand."""
    length = 1024 * PERIOD
    entries = torch.arange(first, first + min(length, values.numel()), device=values.device)
    block = (entries % PERIOD).float() * factor + summand
    for part in values.split(length):
        part.copy_(block[: part.numel()])
