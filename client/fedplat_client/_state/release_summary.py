"""What has left a client by month and job, from its record (`released`)."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable

from fedplat import texts
from fedplat_client._state.released import ReleasedLine

_NOTES = ("digest", "decision")
"""Lines beside which nothing is sent: the digest of the line before, and a decision of the owner."""


@dataclasses.dataclass
class JobMonth:
    """What has left in a month for a job: `contents` counts what was sent, `receivers` are the ids of other clients.

    `num_masked` of the `num_updates` updates were masked, in sums over at least `min_clients` clients, with noise of at
    least `noise_multiplier` in such a sum. Times are those of the record, in UTC.
    """

    month: str
    job_id: str
    job: str
    digest: str
    trainer: str
    first: str
    last: str
    size_bytes: int = 0
    num_updates: int = 0
    num_masked: int = 0
    min_clients: int = 0
    noise_multiplier: float = 0.0
    contents: Counter[str] = dataclasses.field(default_factory=Counter[str])
    receivers: set[str] = dataclasses.field(default_factory=set[str])
    rounds: set[int] = dataclasses.field(default_factory=set[int])

    @property
    def sent(self) -> str:
        """The counts of what was sent, in words."""
        return ", ".join(f"{number:,} {_count_noun(name, number)}" for name, number in self.contents.most_common())

    @property
    def protection(self) -> str:
        """The masks and noise that have hidden the updates, in words; empty without updates."""
        if not self.num_updates:
            return ""
        if not self.num_masked:
            return "none: each update was readable by itself"
        part = "all" if self.num_masked == self.num_updates else f"{self.num_masked:,} of {self.num_updates:,} updates"
        least = f"with a noise multiplier of at least {self.noise_multiplier:.3g}"
        noise = least if self.noise_multiplier else "without noise"
        return f"{part} masked in sums over at least {self.min_clients} clients, {noise}"

    def add(self, line: ReleasedLine) -> None:
        """Count a line of this month and job."""
        self.first, self.last = min(self.first, line.time), max(self.last, line.time)
        self.size_bytes += line.size_bytes
        self.contents[line.content] += 1
        self.rounds.add(line.round)
        if line.receiver:
            self.receivers.add(line.receiver)
        if line.content == "update":
            self._add_protection(line)

    def _add_protection(self, line: ReleasedLine) -> None:
        masks, is_first = line.protection, not self.num_masked
        self.num_updates += 1
        if masks.masked:
            self.num_masked += 1
            self.min_clients = masks.min_clients if is_first else min(self.min_clients, masks.min_clients)
            least = masks.noise_multiplier if is_first else min(self.noise_multiplier, masks.noise_multiplier)
            self.noise_multiplier = least


_NOUNS = {"metrics": "set of metrics", "ring": "part of a ring"}
_PLURALS = {"metrics": "sets of metrics", "ring": "parts of rings"}


def _count_noun(content: str, number: int) -> str:
    noun = _NOUNS.get(content, content)
    return noun if number == 1 else _PLURALS.get(content, f"{noun}s")


def sum_up(lines: Iterable[ReleasedLine]) -> list[JobMonth]:
    """Return what has left, the latest month first, and in it the job that has sent last."""
    found: dict[tuple[str, str], JobMonth] = {}
    for line in lines:
        if line.content in _NOTES:
            continue
        key = line.time[:7], line.job_id
        if key not in found:
            digest = getattr(line, "job_digest", "")
            found[key] = JobMonth(*key, line.job, digest, line.trainer, line.time, line.time)
        found[key].add(line)
    return sorted(found.values(), key=lambda each: (each.month, each.last), reverse=True)


def describe_period(job: JobMonth) -> str:
    """Return the first and the last day of what has left."""
    first, last = job.first[:10], job.last[:10]
    return first if first == last else f"{first} to {last}"


def describe_rounds(job: JobMonth) -> str:
    """Return the number of rounds."""
    return texts.format_count(len(job.rounds), "round")
