"""Puts the tables of the last saved results into docs/performance.md.

    python benchmarks/page.py

A table stands between `<!-- results: NAME -->` and `<!-- end -->`; what is between is replaced, once there is
such a result.
"""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

import report

PAGE = Path(__file__).resolve().parents[1] / "docs" / "performance.md"
_PLACE = re.compile(r"(<!-- results: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(text: str) -> str:
    """The page with its tables as the results say."""

    def table(place: re.Match[str]) -> str:
        path = report.RESULTS / f"{place[2]}.json"
        if not path.exists():
            return place[0]
        found = msgspec.json.decode(path.read_bytes(), type=report.Report)
        return f"{place[1]}\n{report.markdown(found)}\n\n{place[3]}"

    return _PLACE.sub(table, text)


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text("utf-8")), "utf-8")
