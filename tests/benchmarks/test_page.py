"""The pages with tables of benchmarks show the saved results, and nothing else."""

from __future__ import annotations

import pytest

import page
import report
import times_as_fast


def test_the_pages_show_the_saved_results() -> None:
    for path in page.PAGES:
        text = path.read_text("utf-8")
        assert page.filled(text) == text, "run make bench-page"


def test_every_saved_result_is_on_a_page() -> None:
    text = "".join(path.read_text("utf-8") for path in page.PAGES)
    missing = [path.stem for path in report.RESULTS.glob("*.json") if f"<!-- results: {path.stem} -->" not in text]
    assert not missing


def test_a_table_has_a_row_for_each_result_and_says_where_it_comes_from() -> None:
    made = report.Report(
        name="copy",
        title="Copies",
        columns=("size", "GB/s"),
        rows=(("1 MB", 12.345), ("2 MB", None)),
        command="python benchmarks/copy.py",
        machine="a machine",
        date="2026-01-02",
    )
    assert report.markdown(made).splitlines() == [
        "| size | GB/s |",
        "| --- | ---: |",
        "| 1 MB | 12.3 |",
        "| 2 MB | not measured |",
        "",
        "`python benchmarks/copy.py`, 2026-01-02; a machine.",
    ]


def test_other_platforms_are_compared_by_the_faster_of_their_set_ups() -> None:
    found = {each.work: each for each in times_as_fast.read()}
    assert found["round, 100MB, 10 clients"].times == pytest.approx({"Flower": 2.18, "NVFlare": 2.09}, abs=0.01)
    assert found["round, 100MB, 10 clients"].own == "6.92 s"
    assert found["simulation, LR, 50 of 100 clients, 50 examples"].times == pytest.approx(
        {"pfl-research": 4.08}, abs=0.01
    )
    on_a_gpu = found["simulation on a GPU, LR, 50 of 100 clients, 50 examples"]
    assert (on_a_gpu.own, on_a_gpu.times) == ("48.4 rounds/s", pytest.approx({"pfl-research": 12.61}, abs=0.01))
    assert not any("language model" in work for work in found), "its rows have another unit"
    assert "round, one-tensor, 2 clients" not in found, "no other platform was measured"
