from __future__ import annotations

import ast
import doctest
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedplat.config import expressions
from fedplat.config import label_expressions as labels_module
from fedplat.config.label_expressions import MAX_LENGTH, compile_expression
from fedplat.errors import LabelError

PHONE = {"region": "eu", "memory_mb": "8192", "os": "android-14", "battery": "0.55", "wifi": "yes", "zone": ""}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", True),
        ("  \n ", True),
        ("region == 'eu'", True),
        ('region == "us"', False),
        ("region != 'us'", True),
        ("'eu' == region", True),
        ("zone == ''", True),
        ("  region == 'eu'  ", True),
        ("memory_mb >= 4096", True),
        ("memory_mb >= 8192.0", True),
        ("memory_mb > 8192", False),
        ("4096 <= memory_mb < 10000", True),
        ("4096 <= memory_mb < 8192", False),
        ("memory_mb == 8.192e3", True),
        ("memory_mb > -1", True),
        ("battery < 0.6", True),
        # Text beside text is compared as text, beside a number as a number.
        ("memory_mb > '9'", False),
        ("memory_mb > 9", True),
        ("os >= 'android'", True),
        ("region == os", False),
        ("1 == 1.0", True),
        ("'b' > 'a'", True),
        # Lists and tuples
        ("region in ['us', 'eu']", True),
        ("region in ('us', 'asia')", False),
        ("region not in ['us']", True),
        ("region not in ['eu']", False),
        ("region in []", False),
        ("region not in []", True),
        ("memory_mb in [4096, 8192]", True),
        ("memory_mb in ['8192']", True),
        ("region in [1, 'eu', -2]", True),
        ("region not in [1, 2]", True),
        # Logic
        ("region == 'eu' and memory_mb >= 4096", True),
        ("region == 'us' or memory_mb >= 4096", True),
        ("not region == 'us'", True),
        ("not (region == 'eu' and wifi == 'no')", True),
        ("region == 'us' and wifi == 'yes' or battery > 0.5", True),
        ("region == 'us' and (wifi == 'yes' or battery > 0.5)", False),
        # A label that the client lacks, or that is not a number
        ("gpu == 'yes'", False),
        ("gpu != 'yes'", False),
        ("gpu in ['yes']", False),
        ("gpu not in ['yes']", False),
        ("not gpu == 'yes'", True),
        ("gpu == cpu", False),
        ("region > 3", False),
        ("region != 3", False),
        ("zone == 0", False),
    ],
)
def test_expressions_over_a_phones_labels(text: str, expected: bool):
    assert compile_expression(text)(PHONE) is expected


@pytest.mark.parametrize("value", ["nan", "NaN", "-nan", "", "x", "0x10", "1e", "4096 MB"])
@pytest.mark.parametrize("comparison", ["== 5", "!= 5", "< 5", "<= 5", "> 5", ">= 5", "in [5]"])
def test_a_label_that_is_not_a_number_compares_false(value: str, comparison: str):
    assert compile_expression(f"x {comparison}")({"x": value}) is False


@pytest.mark.parametrize(
    "text",
    [
        "region",
        "1",
        "'eu'",
        "True",
        "x == True",
        "x == -True",
        "x == None",
        "x == ...",
        "x == 1j",
        "x == b'eu'",
        "x == f'{y}'",
        "x == +1",
        "x == ~1",
        "x == --1",
        "x == -'a'",
        "x == not y",
        "x is 'a'",
        "x is not 'a'",
        "x in 'abc'",
        "x in y",
        "x in {'a'}",
        "x in {'a': 1}",
        "x in [y]",
        "x in [['a']]",
        "x in [*y]",
        "x in ['a' for a in y]",
        "['a'] == x",
        "x == ['a']",
        "x + 1 == 2",
        "x == 1 + 1",
        "x == 2 ** 9",
        "x and y == 1",
        "not x",
        "-(x == 1)",
        "(x == 1) == 1",
        "x == 1 if y == 2 else z == 3",
        "(x := 1) == 1",
        "x[0] == 'a'",
        "x.upper == 'a'",
        "x.__class__ == 'a'",
        "().__class__.__base__ == 'a'",
        "len(x) == 1",
        "__import__('os').system('true') == 0",
        "x == open('/etc/passwd')",
        "x in list('ab')",
        "lambda: 0",
        "(lambda: x == 1)()",
        "[x == 1]",
        "x == 1, y == 2",
        "await x == 1",
        "yield x",
        "x = 1",
        "x == 1; y == 2",
        "x == 1\ny == 2",
        "import os",
        "class == 'a'",
        "x ==",
        "== 1",
        "x == 'a",
        "(x == 1",
        "x == 1)",
        "x && y",
        "x == 1 # and \x00",
        "x == '\ud800'",
        "\x00",
        "🙂 == 1",
        "x == 1" + "0" * 400,
        "x == -1" + "0" * 400,
        "x in [1" + "0" * 400 + "]",
        "x == " + "1" * 5000,
        "x == '" + "a" * MAX_LENGTH + "'",
        "(" * 300 + "x == 1" + ")" * 300,
        "[" * 450 + "]" * 450,
        "x in " + "[" * 90 + "]" * 90,
        "-" * 990 + "1",
        "not " * 245 + "x",
        "x == " + "-" * 900 + "1",
        "x" + ".a" * 490 + " == 1",
        "x" + "(" * 90 + ")" * 90,
        "lambda:" * 140 + "0",
    ],
)
def test_anything_else_is_refused(text: str):
    with pytest.raises(LabelError):
        compile_expression(text)


def test_the_message_shows_the_part_that_was_not_understood():
    with pytest.raises(LabelError, match=r"'len\(region\)' is not a label, text or number"):
        compile_expression("wifi == 'yes' and len(region) == 2")
    with pytest.raises(LabelError, match="'region' is not a condition; expected a comparison"):
        compile_expression("region")
    with pytest.raises(LabelError, match="'names' is not a list"):
        compile_expression("region in names")
    with pytest.raises(LabelError, match="the operator Is is not supported"):
        compile_expression("region is 'eu'")
    with pytest.raises(LabelError, match="at most 1000"):
        compile_expression("x" * 1001)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("not " * 244 + "x == 1", True),
        (" and ".join(["x == 1"] * 80), True),
        ("(" * 90 + "x == 1" + ")" * 90, True),
        ("not(x == 2 or " * 60 + "x == 2" + ")" * 60, False),
        ("x in [" + "2, " * 300 + "1]", True),
    ],
)
def test_long_but_honest_expressions_work(text: str, expected: bool):
    assert len(text) <= MAX_LENGTH
    assert compile_expression(text)({"x": "1"}) is expected


def test_nothing_is_evaluated(monkeypatch: pytest.MonkeyPatch):
    def forbidden(*_: Any) -> None:
        raise AssertionError("evaluated")

    for name in ("eval", "exec", "compile"):
        monkeypatch.setattr(f"builtins.{name}", forbidden)

    # ast.parse itself goes through compile(), which only parses with this flag.
    def parse(*_: object, **__: object) -> ast.Expression:
        return ast.Expression(ast.Name("x"))

    monkeypatch.setattr(expressions.ast, "parse", parse)
    with pytest.raises(LabelError):
        compile_expression("nothing is evaluated")


def test_the_example_of_the_docstring_is_true():
    result = doctest.testmod(labels_module)
    assert (result.attempted, result.failed) == (1, 0)


_WORDS = st.sampled_from(
    [
        *"x()[]{},'\"-+.~:;#@\\\n",
        *("region", "and", "or", "not", "in", "is", "lambda", "if", "else", "for", "await", "None", "True"),
        *("==", "!=", "<=", ":=", "**", "...", "'eu'", "1", "1e999", "0.5", "-1", "0x", "1_0", "f'", "b'"),
    ]
)


@settings(deadline=None)
@given(st.text(max_size=60) | st.lists(_WORDS, max_size=25).map(" ".join) | st.lists(_WORDS, max_size=25).map("".join))
def test_any_text_is_a_predicate_or_a_label_error(text: str):
    try:
        predicate = compile_expression(text)
    except LabelError:
        return
    for labels in (PHONE, {}, {"x": "1", "region": "nan"}):
        assert isinstance(predicate(labels), bool)


@settings(deadline=None)
@given(
    name=st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True),
    value=st.text(max_size=20),
    threshold=st.floats(allow_nan=False),
    operator=st.sampled_from(["==", "!=", "<", "<=", ">", ">=", "in", "not in"]),
)
def test_any_label_may_be_compared_with_any_number(name: str, value: str, threshold: float, operator: str):
    number = repr(threshold).replace("inf", "1e999")
    right = f"[{number}]" if "in" in operator else number
    try:
        predicate = compile_expression(f"{name} {operator} {right}")
    except LabelError:  # a keyword as a name
        return
    assert isinstance(predicate({name: value}), bool)
