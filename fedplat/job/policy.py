"""The policy of an owner of data: which jobs may run without being asked, which never, and what decides.

A policy is a TOML file with tables `[[allow]]` and `[[deny]]`. It is applied to the job file and its digest as the
owner has them, never to what a server says of a job. A rule applies if all its keys do. `deny` comes first; then the
first rule of `allow` that applies decides; a job of no rule is asked about, or refused (`unknown`).
"""

from __future__ import annotations

import dataclasses
import datetime
import re
from collections.abc import Iterator
from typing import Annotated, Literal

from msgspec import Meta, Struct

from fedplat.config import toml
from fedplat.config.plugins import name_of
from fedplat.job import sections
from fedplat.job.secure import group_minimum
from fedplat.job.spec import JobSpec

_HOURS = re.compile("([01][0-9]|2[0-3]):[0-5][0-9]-([01][0-9]|2[0-3]):[0-5][0-9]")
_DIGEST = re.compile("[0-9a-f]{64}")
Names = Annotated[tuple[sections.Name, ...], Meta(max_length=1000)]
JobKind = Literal["sync", "buffered", "ssp", "cyclic", "gossip", "flower", "procedure"]
Verdict = Literal["allow", "refuse", "ask"]


class Bounds(Struct, frozen=True, forbid_unknown_fields=True):
    """The least and the largest value of a number."""

    min: float | None = None
    """Least value; none: any."""
    max: float | None = None
    """Largest value; none: any."""

    def __post_init__(self) -> None:
        if self.min is None and self.max is None:
            raise ValueError("min, max: both are missing; expected at least one of them")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min = {self.min:g}, max = {self.max:g}: expected min of at most max")


class DenyRule(Struct, frozen=True, forbid_unknown_fields=True):
    """Jobs that never run."""

    digest: Annotated[tuple[str, ...], Meta(max_length=10_000)] = ()
    """Digests of jobs, as `fedplat job check` prints them."""
    name: Names = ()
    """Names of jobs."""
    population: Names = ()
    """Populations of jobs."""
    trainer: Names = ()
    """Trainers of jobs."""
    kind: tuple[JobKind, ...] = ()
    """Kinds of jobs: the kind of `[mode]`, `flower` or `procedure`."""

    def __post_init__(self) -> None:
        if not any(getattr(self, name) for name in self.__struct_fields__):
            raise ValueError("a rule has no key, and would apply to each job; expected at least one")
        for digest in self.digest:
            if not _DIGEST.fullmatch(digest):
                raise ValueError(f"digest = {toml.format_value(digest)}: expected 64 hexadecimal digits, in lower case")


class AllowRule(DenyRule, frozen=True, forbid_unknown_fields=True):
    """Jobs that run without being asked about."""

    secure_aggregation: bool = False
    """True: only with `[secure_aggregation]`."""
    confirm: bool = False
    """True: only with `secure_aggregation.confirm`."""
    local_noise: bool = False
    """True: only with `privacy.trust = "none"`."""
    min_clients: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    """Least number of clients in a sum that a server learns."""
    max_rounds: sections.Count | None = None
    """Largest number of rounds; none: any."""
    max_epsilon: Annotated[float, Meta(gt=0.0, le=1e6)] | None = None
    """Largest `privacy.epsilon`, which a job then has to state; none: any, and jobs without privacy."""
    max_delta: Annotated[float, Meta(gt=0.0, lt=1.0)] | None = None
    """Largest `privacy.delta`, as `max_epsilon`."""
    config: dict[str, Bounds] = {}
    """Bounds of numbers in `[config]`, which a job then has to state."""
    hours: str | None = None
    """Time of day at the client, such as `20:00-06:00`; none: any."""
    until: str | None = None
    """Last day, such as `2027-03-01`; none: no end."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.digest or self.trainer):
            raise ValueError("a rule of allow has neither digest nor trainer; expected what may run")
        if (self.max_epsilon is None) != (self.max_delta is None):
            raise ValueError("max_epsilon, max_delta: expected both, since one says nothing without the other")
        if self.hours is not None and not _HOURS.fullmatch(self.hours):
            raise ValueError(f"hours = {toml.format_value(self.hours)}: expected two times, such as 20:00-06:00")
        if self.until is not None:
            try:
                datetime.datetime.strptime(self.until, "%Y-%m-%d")
            except ValueError as exc:
                raise ValueError(
                    f"until = {toml.format_value(self.until)}: expected a day, such as 2027-03-01"
                ) from exc


class OwnerPolicy(Struct, frozen=True, forbid_unknown_fields=True):
    """What the owner of a client's data has decided beforehand."""

    unknown: Literal["ask", "refuse"] = "ask"
    """What becomes of a job to which no rule applies."""
    deny: Annotated[tuple[DenyRule, ...], Meta(max_length=1000)] = ()
    """Jobs that never run."""
    allow: Annotated[tuple[AllowRule, ...], Meta(max_length=1000)] = ()
    """Jobs that run without being asked about."""


def parse_policy(text: str) -> OwnerPolicy:
    """Parse a policy. Raises `JobFileError`, with one line per mistake."""
    return toml.read_record(toml.read_toml(text), OwnerPolicy)


@dataclasses.dataclass(frozen=True)
class RuleFinding:
    """A rule, such as `allow 2`, and the keys that do not apply to a job, each with the reason; none: it applies."""

    rule: str
    contrary: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class PolicyDecision:
    """What a policy decides; `rule` is the one that has decided, or `unknown`. The findings are in order."""

    verdict: Verdict
    rule: str
    findings: tuple[RuleFinding, ...]


def decide(policy: OwnerPolicy, spec: JobSpec, digest: str, now: datetime.datetime) -> PolicyDecision:
    """Return what a policy decides of a job at a moment, which is the local time of the client."""
    findings: list[RuleFinding] = []
    for number, rule in enumerate(policy.deny, 1):
        findings.append(RuleFinding(f"deny {number}", tuple(_list_other_jobs(rule, spec, digest))))
        if not findings[-1].contrary:
            return PolicyDecision("refuse", findings[-1].rule, tuple(findings))
    for number, rule in enumerate(policy.allow, 1):
        contrary = (
            *_list_other_jobs(rule, spec, digest),
            *_list_unsafe(rule, spec),
            *_list_exceeded(rule, spec),
            *_list_expired(rule, now),
        )
        findings.append(RuleFinding(f"allow {number}", contrary))
        if not contrary:
            return PolicyDecision("allow", findings[-1].rule, tuple(findings))
    return PolicyDecision(policy.unknown, "unknown", tuple(findings))


def kind_of(spec: JobSpec) -> str:
    """Return the kind of a job, as rules name it (`JobKind`)."""
    tables = {"flower": spec.flower, "procedure": spec.procedure}
    return next((name for name, table in tables.items() if table is not None), name_of(spec.mode))


def _list_other_jobs(rule: DenyRule, spec: JobSpec, digest: str) -> Iterator[str]:
    named = {"name": spec.name, "population": spec.population, "trainer": spec.trainer}
    found = {"digest": digest, **named, "kind": kind_of(spec)}
    for key, value in found.items():
        if (expected := getattr(rule, key)) and value not in expected:
            yield f"{key}: the job has {value}"


def _list_unsafe(rule: AllowRule, spec: JobSpec) -> Iterator[str]:
    secure, privacy = spec.secure_aggregation, spec.privacy
    if rule.secure_aggregation and secure is None:
        yield "secure_aggregation: the job has none"
    if rule.confirm and not (secure is not None and secure.confirm):
        yield "confirm: the clients of the job do not confirm the survivors to each other"
    if rule.local_noise and not (privacy is not None and privacy.trust == "none"):
        yield "local_noise: the clients of the job add none"
    fewest = group_minimum(spec) if secure is not None else 1
    if fewest < rule.min_clients:
        yield f"min_clients: the server learns sums of {fewest}"
    for key, most in (("epsilon", rule.max_epsilon), ("delta", rule.max_delta)):
        stated: float | None = getattr(privacy, key, None)
        if most is not None and not (stated is not None and stated <= most):
            yield f"max_{key}: the job " + ("states none" if stated is None else f"has {stated:g}")


def _list_exceeded(rule: AllowRule, spec: JobSpec) -> Iterator[str]:
    if rule.max_rounds is not None and spec.rounds > rule.max_rounds:
        yield f"max_rounds: the job has {spec.rounds:,}"
    for key, bounds in rule.config.items():
        value = spec.client_config.get(key)
        if isinstance(value, (bool, str)) or value is None:
            yield f"config.{toml.shown_key(key)}: the job has no such number"
        elif not (bounds.min is None or value >= bounds.min) or not (bounds.max is None or value <= bounds.max):
            yield f"config.{toml.shown_key(key)}: the job has {value:g}"


def _list_expired(rule: AllowRule, now: datetime.datetime) -> Iterator[str]:
    if rule.until is not None and now.date() > datetime.date.fromisoformat(rule.until):
        yield f"until: today is {now.date()}"
    if rule.hours is not None:
        begin, _, end = rule.hours.partition("-")
        time = f"{now:%H:%M}"
        is_within = begin <= time < end if begin < end else time >= begin or time < end
        if not is_within:
            yield f"hours: it is {time}"
