"""The vectors that a collective works on, filled with known numbers."""

from __future__ import annotations

import dataclasses

import torch

from fedplat.pytorch.distributed import Ranks

PERIOD = 1021
"""Entry i of rank r's vector is i mod 1021, plus r: a prime, so that all pieces differ, and sums are exact."""
ADDING = frozenset({"reduce", "reduce-scatter", "all-reduce"})


@dataclasses.dataclass(frozen=True)
class Buffers:
    """One rank's vectors of one size: the input `give`, the output `take`, and `scratch` memory.

    Collectives that add have their input in `take`, and write the result there, like nccl-tests in place.
    """

    ranks: Ranks
    give: torch.Tensor
    take: torch.Tensor
    scratch: torch.Tensor

    @classmethod
    def allocate(cls, ranks: Ranks, size_bytes: int) -> Buffers:
        """Return buffers of at most `size_bytes`, with as many entries for each rank."""
        count = size_bytes // 4 // ranks.size * ranks.size
        buffers = cls(ranks, *(torch.empty(count, dtype=torch.float32, device=ranks.device) for _ in range(3)))
        fill_pattern(buffers.give, 0, 1.0, ranks.rank)
        return buffers

    @property
    def count(self) -> int:
        """Number of entries of a vector, a multiple of the number of ranks."""
        return self.give.numel()

    def piece(self, rank: int) -> slice:
        """Return a rank's part of a vector."""
        length = self.count // self.ranks.size
        return slice(rank * length, (rank + 1) * length)

    @property
    def mine(self) -> slice:
        """This rank's part of a vector."""
        return self.piece(self.ranks.rank)

    def prepare(self, collective: str) -> None:
        """Set `take` to the input that the collective expects there; no earlier result remains in it."""
        self.take.zero_()
        if collective in ADDING:
            self.take.copy_(self.give)
        elif collective in ("all-gather", "gather"):
            self.take[self.mine] = self.give[self.mine]
        elif collective == "broadcast" and self.ranks.is_first:
            self.take.copy_(self.give)

    def is_correct(self, collective: str) -> bool:
        """Return whether `take` holds the result of the collective on this rank. Overwrites `scratch`."""
        ranks, first = self.ranks, self.ranks.is_first
        terms = (float(ranks.size), ranks.size * (ranks.size - 1) / 2)  # of sums
        expected: list[tuple[slice, int, float, float]] = []  # a part, its first entry, factor and summand
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
        for part, start, factor, summand in expected:
            fill_pattern(self.scratch[part], start, factor, summand)
            if not torch.equal(self.take[part], self.scratch[part]):
                return False
        return True


def fill_pattern(values: torch.Tensor, first: int, factor: float, summand: float) -> None:
    """Fill the part of a vector that starts at entry `first` with (entry mod 1021) * factor + summand."""
    length = 1024 * PERIOD
    entries = torch.arange(first, first + min(length, values.numel()), device=values.device)
    block = (entries % PERIOD).float() * factor + summand
    for part in values.split(length):
        part.copy_(block[: part.numel()])
