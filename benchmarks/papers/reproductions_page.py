"""Write the tables of the kept logs into docs/reproductions.md and docs/privacy.md.

    python benchmarks/papers/reproductions_page.py

The text between `<!-- paper: NAME -->` and `<!-- end -->` is replaced with the table.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path

from reproduction import HERE, RESULTS, Paper, read_logs, table

import report

_DOCS = HERE.parents[1] / "docs"
PAGES = {
    _DOCS / "reproductions.md": (
        "mcmahan",
        "fedprox_stragglers",
        "niid_bench",
        "robust_rules",
        "logits_calibration",
        "sharpness_aware",
        "not_true_distillation",
        "diloco",
        "federated_adapters",
    ),
    _DOCS / "privacy.md": ("private_utility", "distributed_noise"),
}
PAPERS = tuple(paper for papers in PAGES.values() for paper in papers)
_PLACE = re.compile(r"(<!-- paper: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(text: str, results: Path = RESULTS) -> str:
    """Return the page with the tables of the logs."""

    def tabled(place: re.Match[str]) -> str:
        paper: Paper = importlib.import_module(place[2]).PAPER
        logs = read_logs(paper, results)
        shown = report.markdown(table(paper, logs))
        if not logs:
            shown = shown.replace(", ; .", ": no run yet.")
        return f"{place[1]}\n{shown}\n\n{place[3]}"

    return _PLACE.sub(tabled, text)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(filled(page.read_text("utf-8")), "utf-8")
