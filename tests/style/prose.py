"""Sentences are plain English: verb-first docstrings, and none of the words that engineers do not write."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator

from style.sources import FILES, PACKAGES, Finding, Source, Sources, is_generated, is_property

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


FOLDERS = (*PACKAGES, "proto", "docs", "examples", "docker", "benchmarks")
KINDS = (".py", ".md", ".proto", ".toml", ".yaml", ".yml", ".sh")


def check(sources: Sources) -> Iterator[Finding]:
    for source in sources:
        if has_sentences(source):
            yield from refused(source.path, enumerate(source.text.splitlines(), 1))
        elif source.is_in("tests") and not source.is_in("tests/style") and ANY_PHRASE.search(source.text):
            yield from refused(source.path, comment_lines(source))
    for source in sources.modules():
        for function in source.functions:
            refused_words = QUESTIONS if is_property(function) else QUESTIONS | NOT_VERBS
            if (text := ast.get_docstring(function)) and text.split()[0].strip(",.:;") in refused_words:
                start = text.splitlines()[0]
                yield Finding(source.path, function.lineno, f"{function.name}: not a verb or noun first: {start}")


def has_sentences(source: Source) -> bool:
    """Return whether people read a file: a module, the protocol, a document, an example or a container's file."""
    if source.path in FILES:
        return True
    return source.is_in(*FOLDERS) and source.path.endswith(KINDS) and not is_generated(source)


def refused(path: str, lines: Iterable[tuple[int, str]]) -> Iterator[Finding]:
    """Yield a message for each refused phrase in numbered lines of a file."""
    for number, line in lines:
        for phrase, instead in PHRASES if ANY_PHRASE.search(line) else ():
            for match in phrase.finditer(line):
                yield Finding(path, number, f"{match[0]!r}; better: {instead}")


def comment_lines(source: Source) -> Iterator[tuple[int, str]]:
    """Yield the comments and docstrings of a module, also those of its variables, as numbered lines."""
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    lines = source.text.splitlines()
    for node in source.nodes:
        match node:
            case ast.Expr(value=ast.Constant(value=str()), lineno=first, end_lineno=last):
                yield from enumerate(lines[first - 1 : last], first)
            case _:
                pass
