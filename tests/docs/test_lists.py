"""Lists of CommonMark become lists of Python-Markdown, which makes the site."""

from __future__ import annotations

import re

import markdown
import pytest

from markdown_lists import adapt_lists
from support.docs.blocks import ROOT

CASES = {
    "a list after text": ("text:\n- a\n- b", "<p>text:</p><ul><li>a</li><li>b</li></ul>"),
    "a nested list": ("1. a\n   - b\n   - c\n2. d", "<ol><li>a<ul><li>b</li><li>c</li></ul></li><li>d</li></ol>"),
    "an item after a nested paragraph": (
        "- a\n\n  b\n- c",
        "<ul><li><p>a</p><p>b</p></li><li><p>c</p></li></ul>",
    ),
    "code in an item": (
        "- a\n\n  ```\n  if b:\n    - c\n  ```\n- d",
        "<ul><li><p>a</p><pre><code>if b:\n  - c\n</code></pre></li><li><p>d</p></li></ul>",
    ),
    "a long line of an item": ("- a\n  b\nc", "<ul><li>a b c</li></ul>"),
    "text after a list": ("- a\n\nb", "<ul><li>a</li></ul><p>b</p>"),
    "a table after text": (
        "text\n| a |\n|---|\n| b |",
        "<p>text</p><table><thead><tr><th>a</th></tr></thead><tbody><tr><td>b</td></tr></tbody></table>",
    ),
    "code with a list": ("```\ntext\n- a\n```", "<pre><code>text\n- a\n</code></pre>"),
}


@pytest.mark.parametrize(("text", "html"), CASES.values(), ids=CASES)
def test_lists_are_those_of_code_hosts(text: str, html: str) -> None:
    made = markdown.markdown(adapt_lists(text), extensions=["tables", "pymdownx.superfences"])
    made = re.sub(r"<div class=.highlight.>(.*?)</div>", r"\1", made, flags=re.DOTALL).replace("<span></span>", "")
    plain = re.sub(r"\s*(</?(?:p|ul|ol|li|table|thead|tbody|tr|th|td|pre)>)\s*", r"\1", made)
    assert re.sub(r"\n +(?=\w)", " ", plain.split("<code>")[0]) + plain[len(plain.split("<code>")[0]) :] == html


@pytest.mark.parametrize("name", ["README.md", "docs/jobs.md", "docs/operations.md"])
def test_only_space_changes(name: str) -> None:
    text = (ROOT / name).read_text("utf-8")
    assert adapt_lists(text).split() == text.split()
