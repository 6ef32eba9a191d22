"""The policy of an owner of data in words: what a rule is about, and what it asks of a job."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from fedplat.config import toml
from fedplat.job.policy import Bounds, DenyRule, OwnerPolicy

_UNKNOWN = {
    "ask": "Jobs to which no rule applies wait until they are approved or rejected here.",
    "refuse": "Jobs to which no rule applies are refused.",
}


def describe_unknown(policy: OwnerPolicy) -> str:
    """Return what becomes of a job to which no rule applies."""
    return _UNKNOWN[policy.unknown]


def describe_rule(rule: DenyRule) -> list[str]:
    """Return the conditions of a rule, each as a text; the rule applies if all of them do."""
    return [
        text for name, describe in _WORDS.items() if (value := getattr(rule, name, None)) for text in describe(value)
    ]


def _list_choices(values: Sequence[str]) -> str:
    return " or ".join([", ".join(values[:-1]), values[-1]] if len(values) > 1 else values)


def _choose(text: str) -> Callable[[Sequence[str]], list[str]]:
    return lambda values: [text.format(_list_choices(values))]


def _describe_bounds(config: Mapping[str, Bounds]) -> Iterator[str]:
    for key, bounds in config.items():
        least = f"at least {bounds.min:g}" if bounds.min is not None else ""
        most = f"at most {bounds.max:g}" if bounds.max is not None else ""
        limits = " and ".join(filter(None, (least, most)))
        yield f"[config] has a number {toml.shown_key(key)} of {limits}"


_WORDS: Mapping[str, Callable[[Any], Sequence[str] | Iterator[str]]] = {
    "digest": _choose("its digest is {}"),
    "name": _choose("its name is {}"),
    "population": _choose("its population is {}"),
    "trainer": _choose("its trainer is {}"),
    "kind": _choose("its kind is {}"),
    "secure_aggregation": lambda _: ["it has secure aggregation"],
    "confirm": lambda _: ["its clients confirm the survivors of a secure aggregation to each other"],
    "local_noise": lambda _: ["its clients add the noise themselves"],
    "min_clients": lambda number: [f"the server learns only sums over at least {number:,} clients"],
    "max_rounds": lambda number: [f"it has at most {number:,} rounds"],
    "max_epsilon": lambda number: [f"it states an epsilon of at most {number:g}"],
    "max_delta": lambda number: [f"it states a delta of at most {number:g}"],
    "config": _describe_bounds,
    "hours": lambda hours: ["it is between {} and {} by this machine's clock".format(*hours.split("-"))],
    "until": lambda day: [f"today is not after {day}"],
}
"""The words of each key of a rule."""
