"""Growth: the fitted slopes, and that its light clients do a client's work."""

from __future__ import annotations

from pathlib import Path

import pytest

import growth
from deployment import deploy_light, measure
from growth import Measurement, Point
from models import alike, parameters
from processes import FailedError


def test_the_exponent_of_what_grows_in_proportion_is_one_and_of_what_is_flat_nought() -> None:
    sizes = [1.0, 10.0, 100.0, 1000.0]
    assert growth.exponent(sizes, [3 * size for size in sizes]) == pytest.approx(1.0)
    assert growth.exponent(sizes, [5.0] * 4) == pytest.approx(0.0)
    assert growth.exponent(sizes, [size**0.5 for size in sizes]) == pytest.approx(0.5)


def test_slopes_are_told_in_units_that_fit() -> None:
    def found(series: str, size: int, clients: int, tensors: int, seconds: float) -> Measurement:
        return Measurement(Point(series, size, clients, tensors), [seconds], 10**8 + 2 * size)

    told = list(
        growth.fits(
            [
                *(found("model", size, 4, 1, size / 10**9) for size in (10**6, 10**8)),
                *(found("cohort", 10**6, clients, 1, 0.002 * clients) for clients in (10, 1000)),
                *(found("tensors", 10**6, 4, tensors, 0.5 + 3e-6 * tensors) for tensors in (1, 1000)),
            ]
        )
    )
    assert told == [
        "Model size: time ~ size^1.00, 1 s a GB.",
        "Model size: the server uses 2.00 bytes of memory per byte of the model.",
        "Cohort: time ~ size^1.00, 2 ms a client.",
        "Tensors: time ~ size^0.00, 3 µs a tensor.",
    ]


def test_what_needs_more_room_than_there_is_is_not_started() -> None:
    with pytest.raises(FailedError, match="set TMPDIR to a folder with more space"):
        growth.run(Point("model", 10**15, 4), 1, 1.0)


@pytest.mark.slow
def test_light_clients_do_rounds_by_report_and_by_upload(tmp_path: Path) -> None:
    with deploy_light(tmp_path, 5) as deployment:
        for size in (4096, 10**6):
            assert len(measure(deployment, 5, 2, parameters(alike(size, 3)))) == 2
