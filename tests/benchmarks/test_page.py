"""The pages with tables of benchmarks show the saved results, and nothing else."""

from __future__ import annotations

import page
import report


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
