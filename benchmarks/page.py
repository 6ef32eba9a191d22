"""Write the tables of the last saved results into docs/performance.md, docs/pool.md and docs/decentralised.md.

    python benchmarks/page.py

The text between `<!-- results: NAME -->` and `<!-- end -->` is replaced with the table, if there is such a result. The
first table, and its picture, compare all results with other platforms.
"""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

import report
import times_as_fast

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE = DOCS / "performance.md"
PAGES = (PAGE, DOCS / "pool.md", DOCS / "decentralised.md")
_PLACE = re.compile(r"(<!-- results: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(text: str) -> str:
    """Return the page with the tables of the saved results."""

    def table(place: re.Match[str]) -> str:
        if place[2] == times_as_fast.NAME:
            return f"{place[1]}\n{times_as_fast.markdown()}\n\n{place[3]}"
        path = report.RESULTS / f"{place[2]}.json"
        if not path.exists():
            return place[0]
        saved = msgspec.json.decode(path.read_bytes(), type=report.Report)
        return f"{place[1]}\n{report.markdown(saved)}\n\n{place[3]}"

    return _PLACE.sub(table, text)


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(filled(path.read_text("utf-8")), "utf-8")
    times_as_fast.draw()
