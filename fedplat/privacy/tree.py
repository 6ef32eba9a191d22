"""Noise of a binary tree over the rounds: the sum of all steps so far has the noise of a few nodes, not of every round.

Source: Kairouz et al. 2021, "Practical and Private (Deep) Learning Without Sampling or Shuffling", arXiv 2103.00039,
Algorithm 1 (DP-FTRL) and Appendix B; the tree is that of Dwork et al. 2010 and Chan et al. 2011. Node (l, i) covers the
rounds i 2^l + 1 to (i + 1) 2^l. After round t the sum has the noise of the nodes that make up t in binary. So round t
adds the noise of the node that it completes, and subtracts that of the smaller nodes covered by it.

Each node's noise is generated from a seed, which must be stored until a larger node replaces it: the seeds of the open
nodes are part of the rule's state.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from fedplat.privacy.noise import KEY_BYTES, Noise, Normals

_STEP, _SEED = "tree step", "tree seed"
_WORDS = 6
"""Number of 43-bit integers in which a seed is stored; float64 holds them exactly."""
_BITS = 43


@dataclasses.dataclass(frozen=True)
class Tree:
    """The tree of a job, by its number of rounds."""

    rounds: int

    def first(self) -> Mapping[str, float]:
        """Return the state before the first round: no node is open."""
        words = {_word(level, index): 0.0 for level in range(self.rounds.bit_length()) for index in range(_WORDS)}
        return {_STEP: 0.0, **words}

    def step(self, scalars: Mapping[str, float], noise: Noise, first: int, size: int) -> Normals:
        """Return what the next round adds to the noise of the sum of all rounds, in units of a node's deviation."""
        level = self._find_completed_level(scalars)
        total = Noise(_fresh(noise)).normal("node", first, size)
        for covered in range(level):
            total -= Noise(_seed(scalars, covered)).normal("node", first, size)
        return total

    def after(self, scalars: Mapping[str, float], noise: Noise) -> Mapping[str, float]:
        """Return the state after the next round, without the seeds of covered nodes."""
        level = self._find_completed_level(scalars)
        forgotten = {_word(covered, index): 0.0 for covered in range(level) for index in range(_WORDS)}
        number = int.from_bytes(_fresh(noise), "big")
        words = {_word(level, index): float(number >> (_BITS * index) & (1 << _BITS) - 1) for index in range(_WORDS)}
        return {**scalars, **forgotten, **words, _STEP: scalars[_STEP] + 1.0}

    def _find_completed_level(self, scalars: Mapping[str, float]) -> int:
        """Return the level of the largest node that the next round completes."""
        step = int(scalars[_STEP]) + 1
        if step > self.rounds:
            raise ValueError(f"the tree is for {self.rounds} rounds, and this would be round {step}")
        return (step & -step).bit_length() - 1


def _fresh(noise: Noise) -> bytes:
    return noise.derive_key("node")


def _seed(scalars: Mapping[str, float], level: int) -> bytes:
    number = sum(int(scalars[_word(level, index)]) << (_BITS * index) for index in range(_WORDS))
    return number.to_bytes(KEY_BYTES, "big")


def _word(level: int, index: int) -> str:
    return f"{_SEED} {level} {index}"


def has_seeds(beginning: bytes) -> bool:
    """Return whether a file that begins like this is the state of a rule with seeds of nodes."""
    return f'"{_SEED} '.encode() in beginning
