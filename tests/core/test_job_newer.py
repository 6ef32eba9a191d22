"""Job files with keys and names of a later release."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from fedplat.config.plugins import has_absent
from fedplat.errors import JobFileError
from fedplat.job import is_unreadable, parse_job, read_newer
from support.jobs import write_job

OURS = write_job("ours", population="eu", rounds=7, retention={"versions": 3})
PRIVACY: dict[str, Any] = {"delta": 1e-5, "participation": "fixed", "noise_multiplier": 2.0, "max_releases": 9}


@pytest.mark.parametrize(
    "text",
    [
        OURS.replace("[model]", "future = 1\n[model]", 1),
        OURS + "[future]\nkey = 1\n",
        OURS + "[aggregation]\nrule = 'of-the-future'\n",
        OURS + "[mode]\nkind = 'of-the-future'\n",
        OURS + "[updates]\nclip_norm = 'dynamic'\n",
    ],
)
def test_all_keys_without_mistakes_are_read(text: str) -> None:
    with pytest.raises(JobFileError):
        parse_job(text)
    spec = read_newer(text, None)
    assert is_unreadable(spec)
    assert has_absent(spec)
    assert (spec.name, spec.population, spec.rounds, spec.retention.versions) == ("ours", "eu", 7, 3)


@pytest.mark.parametrize("key", ["name", "population", "trainer", "rounds", "model", "selection"])
def test_a_required_key_that_cannot_be_read_has_a_placeholder(key: str) -> None:
    spec = read_newer(OURS.replace(key, f"{key}_of_the_future"), None)
    assert is_unreadable(spec)
    assert ("unreadable" in (spec.name, spec.population, spec.trainer, spec.model.initial[:10])) == (
        key not in ("rounds", "selection")
    )


@pytest.mark.parametrize("stored", [PRIVACY, PRIVACY | {"future": 1}, {"future": 1}, {"epsilon": None}])
def test_a_private_job_stays_private(stored: dict[str, Any]) -> None:
    spec = read_newer(OURS + "[privacy]\nfuture = 1\n", stored)
    assert spec.privacy is not None
    if "delta" in stored:
        assert msgspec.to_builtins(spec.privacy).items() >= PRIVACY.items()


@pytest.mark.parametrize(("more", "stored"), [("", PRIVACY), ("[privacy]\nfuture = 1\n", None)])
def test_a_job_that_is_private_in_one_place_only_is_refused(more: str, stored: dict[str, Any] | None) -> None:
    with pytest.raises(JobFileError, match="do not agree"):
        read_newer(OURS + more, stored)


def test_a_job_of_this_release_is_not_unreadable() -> None:
    assert not is_unreadable(parse_job(OURS))
