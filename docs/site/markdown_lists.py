"""Lists as Python-Markdown reads them.

Code hosts follow CommonMark: what belongs to an item is indented as far as the item's text, and a list or a table may
follow a line of text. Python-Markdown wants four spaces for each level, and an empty line before a list or a table.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

ITEM = re.compile(r" *(?:[-*+]|\d{1,9}[.)]) +(?=\S)")
FENCE = re.compile(r" *(`{3,})")
TABLE = re.compile(r" *\|.*\n *\|[ :|-]+$")
WIDTH = 4


def adapt_lists(text: str) -> str:
    """Return the Markdown with four spaces for each level of lists, and empty lines before lists and tables."""
    return "\n".join(_Adapter(text.split("\n")).adapt())


class _Adapter:
    def __init__(self, lines: list[str]) -> None:
        self.lines = lines
        self.offsets: list[int] = []
        """Where the text of each item around a line begins."""
        self.fence = ""
        """The mark that ends the block of code around a line."""
        self.paragraph = ""
        """What the line before belongs to: "item", "text", "code", or "" after an empty line."""

    def adapt(self) -> Iterator[str]:
        for number, line in enumerate(self.lines):
            if not line.strip():
                self.paragraph = ""
                yield ""
                continue
            if not self.fence and self._begins_block(number):
                yield ""
            offset = self.offsets[-1] if self.offsets else 0
            indent = len(line) - len(line.lstrip())
            yield " " * max(0, WIDTH * len(self.offsets) + indent - offset) + line.lstrip()
            self._enter(line)

    def _begins_block(self, number: int) -> bool:
        """Leave the lists that end before a line; return whether it needs an empty line before it."""
        line = self.lines[number]
        item = ITEM.match(line)
        continues = self.paragraph in ("item", "text") and not item
        while self.offsets and len(line) - len(line.lstrip()) < self.offsets[-1] and not continues:
            self.offsets.pop()
        is_table = TABLE.match("\n".join(self.lines[number : number + 2]))
        return bool((item and self.paragraph in ("text", "code")) or (is_table and self.paragraph))

    def _enter(self, line: str) -> None:
        """Note the item or the block of code that begins or ends with a line."""
        if not self.fence and (item := ITEM.match(line)):
            self.offsets.append(item.end())
            self.paragraph = "item"
        elif self.paragraph != "item":
            self.paragraph = "text"
        if (mark := FENCE.match(line)) and self.fence in ("", line.strip()):
            self.fence = "" if self.fence else mark[1]
            self.paragraph = "code"
