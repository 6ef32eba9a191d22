"""The table `[simulation.links]` of a simulation file: links between silos that fail, and silos that die."""

from __future__ import annotations

from typing import Annotated

import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct

from fedplat.simulation.clients import distributions, fleet

SiloIndex = Annotated[int, Meta(ge=0, lt=fleet.MAX_CLIENTS)]
RoundNumber = Annotated[int, Meta(ge=1, le=10_000_000)]
Mask = npt.NDArray[np.bool_]


class Cut(Struct, frozen=True, forbid_unknown_fields=True):
    """A link between two silos that carries nothing from round `first` to round `last`."""

    silos: tuple[SiloIndex, SiloIndex]
    first: RoundNumber
    last: RoundNumber

    def __post_init__(self) -> None:
        _check_span(self.first, self.last)


class Outage(Struct, frozen=True, forbid_unknown_fields=True):
    """A silo that dies in round `first`, once it has its neighbours' models, and is back after round `last`."""

    silo: SiloIndex
    first: RoundNumber
    last: RoundNumber

    def __post_init__(self) -> None:
        _check_span(self.first, self.last)


class LinkOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """The faults of a decentralised job: of all messages between silos the share `loss` is lost, `cuts` and `dead`."""

    loss: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    cuts: Annotated[tuple[Cut, ...], Meta(max_length=10_000)] = ()
    dead: Annotated[tuple[Outage, ...], Meta(max_length=10_000)] = ()

    def is_dead(self, silo: int, round_number: int, *, at_end: bool = False) -> bool:
        """Return whether a silo is dead at the beginning of a round, or at its end."""
        begin = round_number if at_end else round_number - 1
        return any(each.silo == silo and each.first <= begin and round_number <= each.last for each in self.dead)

    def is_lost(self, seed: int, round_number: int, links: npt.NDArray[np.int64]) -> Mask:
        """Return which messages are lost in a round, for links [links, 2] from sender to receiver."""
        lost = distributions.hash_uniform(seed, links[:, 0], links[:, 1], round_number) < self.loss
        for cut in self.cuts:
            if cut.first <= round_number <= cut.last:
                lost |= np.all(links == cut.silos, axis=1) | np.all(links == cut.silos[::-1], axis=1)
        return lost


def _check_span(first: int, last: int) -> None:
    if last < first:
        raise ValueError(f"last = {last}: expected at least first, which is {first}")
