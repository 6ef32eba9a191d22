"""Text for people: durations, and untrusted text, bounded before it is stored, logged, shown or forwarded."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

MAX_TEXT_BYTES = 2_000
"""Maximum size in bytes of UTF-8 of a reason or any other text for people, wherever it is stored."""
NAME_PATTERN = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}"
"""A name of a job, a population, a trainer, a plugin or a project."""
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i)?B?", re.IGNORECASE)
_DURATION = re.compile(r"([0-9]{1,12}(?:\.[0-9]{0,12})?|\.[0-9]{1,12}) ?(ms|s|min|m|h|d|w)?", re.ASCII)
_UNITS_S = {"ms": 0.001, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400, "w": 604_800}
_MAX_PERIOD_S = 1000 * 365.25 * 86_400
_MAX_QUOTED = 200
_CUT = "..."


def shorten(text: str, max_bytes: int = MAX_TEXT_BYTES) -> str:
    r"""Return the text without control characters, cut to at most `max_bytes` bytes of UTF-8.

    Characters that could control a terminal become U+FFFD; line feeds stay. Text that was cut ends with three dots.

    >>> shorten("far too long", 8)
    'far t...'
    >>> shorten("\x1b[2J")
    '\ufffd[2J'
    """
    if text.isascii() and text.isprintable() and len(text) <= max_bytes:
        return text
    plain = "".join(char if char.isprintable() or char == "\n" else "\ufffd" for char in text[: max_bytes + 1])
    content = plain.encode()
    if len(content) <= max_bytes:
        return plain
    cut = _CUT[:max_bytes]
    return content[: max_bytes - len(cut)].decode(errors="ignore") + cut


def repair(text: str) -> str:
    r"""Return the text with the bytes escaped that are not UTF-8, such as those of a file's name in Latin-1.

    Neither protobuf nor JSON can hold the lone surrogates as which Python reads such bytes.

    >>> repair(b"M\xfcller.png".decode(errors="surrogateescape"))
    'M\\xfcller.png'
    """
    try:
        return text.encode(errors="surrogateescape").decode(errors="backslashreplace")
    except UnicodeEncodeError:  # another surrogate
        return text.encode(errors="backslashreplace").decode()


def describe(exc: BaseException) -> str:
    """Return the type and the text of an exception of someone's code, such as `KeyError: 'epochs'`, as valid UTF-8."""
    try:
        text = str(exc)
    except BaseException as broken:  # the class of the exception is someone's code, too
        text = f"its text cannot be read, which raises {name_type(broken)}"
    return repair(f"{name_type(exc)}: {text}" if text else name_type(exc))


def name_type(value: object) -> str:
    """Return the name of an object's class, also if its metaclass has another idea of names."""
    return str(type.__dict__["__name__"].__get__(type(value)))


def quote(text: str) -> str:
    """Return the text in quotation marks with control characters escaped, in about 200 characters at most."""
    shown = repr(text[:_MAX_QUOTED])
    return shown if len(text) <= _MAX_QUOTED and len(shown) <= 2 * _MAX_QUOTED else shown[:_MAX_QUOTED] + _CUT


def format_numbers(numbers: Iterable[int]) -> str:
    """Return integers as a list in text, each as by `format_number`.

    >>> format_numbers([3, 10**4000])
    '[3, (a number of 13288 bits)]'
    """
    return f"[{', '.join(map(format_number, numbers))}]"


def format_number(number: int) -> str:
    """Return an integer as text, or its size if it has more than 128 bits."""
    return str(number) if number.bit_length() <= 128 else f"(a number of {number.bit_length()} bits)"


def format_count(number: int, noun: str) -> str:
    """Return a number with its noun, such as `1 run` or `1,000 runs`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def duration(seconds: float) -> str:
    """Return a duration such as `230 ms`, `2.1 s`, `3 min 5 s`, `2 h 40 min` or `3 d 4 h`; `-` if it is not finite."""
    if not math.isfinite(seconds):
        return "-"
    if seconds < 0.9995:
        return f"{max(0.0, seconds) * 1000:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 24 else f"{hours // 24} d {hours % 24} h"


def size(num_bytes: float) -> str:
    """Format a size in bytes: `36.1 KiB`."""
    if num_bytes < 1024:
        return f"{num_bytes:.0f} B"
    value = float(num_bytes)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        value /= 1024
        if value < 1023.95 or unit == "TiB":
            return f"{value:.1f} {unit}"
    raise AssertionError("the last unit has no upper end")


def parse_size(text: str) -> int:
    """Return a size in bytes. Raises `ValueError`.

    >>> parse_size("500MB"), parse_size("1.5 GiB"), parse_size("4096")
    (500000000, 1610612736, 4096)
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a size; expected a number of bytes, such as 500MB or 2GiB")
    number, prefix, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** " KMGT".index(prefix.upper() or " "))


def parse_duration(text: str) -> float:
    """Return a duration in seconds; a bare number is one of seconds. Raises `ValueError`.

    >>> parse_duration("15s"), parse_duration("1.5h"), parse_duration("2 min"), parse_duration("0.5")
    (15.0, 5400.0, 120.0, 0.5)
    """
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a duration; expected a number and a unit, such as 15s, 10m, 24h or 7d")
    return float(match[1]) * _UNITS_S[match[2] or "s"]


def parse_period(text: str) -> float:
    """Return a duration above 0 in seconds, with its unit: a bare number may be meant as days. Raises `ValueError`.

    >>> parse_period("30m"), parse_period("90d")
    (1800.0, 7776000.0)
    """
    match = _DURATION.fullmatch(text.strip())
    seconds = float(match[1]) * _UNITS_S[match[2]] if match is not None and match[2] else 0.0
    if not 0.0 < seconds <= _MAX_PERIOD_S:
        raise ValueError(f"{quote(text)}: expected a number and s, m, h, d or w, such as 24h or 90d")
    return seconds


def printable(text: str) -> str:
    """Escape every control character of a text: labels and reasons are received from devices."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
