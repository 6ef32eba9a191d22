"""Sentences are plain English: verb-first docstrings, and none of the words that engineers do not write."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator

import pytest

from style.sources import (
    area_of,
    areas,
    comment_lines,
    functions,
    is_property,
    module_paths,
    modules,
    texts,
    texts_of_tests,
)

REFUSED = {
    "nobody": "no client, no process, no one",
    "whoever": "the client that, a caller that",
    "somebody": "a client, another process",
    "shall": "must, or the present tense",
    "hears?": "receives, is told",
    "says? (?:what|which|why|how|whether|who|that|so)": "name the thing: returns, reports, states",
    "tells? (?:what|which|why|how|whether|who)": "name the thing: returns, reports, states",
    "(?-i:(?:is|are) none)": "there is no ..., or has no ...",
    "that is no(?! longer)": "is not a",
    "(?:has|have) not (?:the|a|an|any|that|those|it|them)": "does not have",
    "of late": "recently",
    "by and by": "gradually",
    "goes on(?! with)": "continues",
    "for ever": "forever, indefinitely",
    "in vain": "without a result",
    "would else": "would otherwise",
}
PHRASES = [(re.compile(rf"\b(?:{words})\b", re.IGNORECASE), instead) for words, instead in REFUSED.items()]
ANY_PHRASE = re.compile(rf"\b(?:{'|'.join(REFUSED)})\b", re.IGNORECASE)
QUESTIONS = frozenset({"How", "What", "When", "Where", "Whether", "Which", "Who", "Whoever", "Whose", "Why"})
NOT_VERBS = frozenset(
    [
        "A",
        "All",
        "An",
        "And",
        "As",
        "At",
        "Both",
        "By",
        "Each",
        "Every",
        "For",
        "From",
        "If",
        "In",
        "It",
        "Its",
        "Like",
        "No",
        "Nobody",
        "Not",
        "Of",
        "On",
        "One",
        "Only",
        "Or",
        "See",
        "So",
        "Some",
        "Such",
        "That",
        "The",
        "Their",
        "There",
        "These",
        "They",
        "This",
        "Those",
        "Though",
        "To",
        "Under",
        "With",
        "Within",
    ]
)


@pytest.mark.parametrize("area", areas(texts()))
def test_the_words_are_plain(area: str) -> None:
    found = [
        finding
        for path, text in texts().items()
        if area_of(path) == area
        for finding in refused(path, enumerate(text.splitlines(), 1))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("area", areas(texts_of_tests()))
def test_the_words_of_comments_in_tests_are_plain(area: str) -> None:
    found = [
        finding
        for path, text in texts_of_tests().items()
        if area_of(path) == area
        for finding in refused(path, comment_lines(text))
    ]
    assert not found, "\n".join(found)


def refused(path: str, lines: Iterable[tuple[int, str]]) -> Iterator[str]:
    """Yield a message for each refused phrase in numbered lines of a file."""
    for number, line in lines:
        for phrase, instead in PHRASES if ANY_PHRASE.search(line) else ():
            for match in phrase.finditer(line):
                yield f"{path}:{number}: {match[0]!r}; better: {instead}"


def test_comments_and_docstrings_of_tests_are_read_and_data_is_not() -> None:
    text = '"""One."""\nA = "data"  # two\n"""Three,\nfour."""\ndef f() -> None:\n    """Five."""\n    g("data")\n'
    assert sorted(comment_lines(text)) == [
        (1, '"""One."""'),
        (2, "# two"),
        (3, '"""Three,'),
        (4, 'four."""'),
        (6, '    """Five."""'),
    ]


@pytest.mark.parametrize("area", areas(module_paths()))
def test_docstrings_begin_with_a_verb_and_those_of_properties_with_a_noun(area: str) -> None:
    found = [
        f"{path}:{function.lineno}: {function.name}: {text.splitlines()[0]}"
        for path, tree in modules().items()
        if area_of(path) == area
        for function in functions(tree)
        if (text := ast.get_docstring(function))
        and text.split()[0].strip(",.:;") in (QUESTIONS if is_property(function) else QUESTIONS | NOT_VERBS)
    ]
    assert not found, "\n".join(found)
