"""Fuzzes one target in this process, with limits on memory and time.

    python tests/fuzz/run.py TARGET [--seconds 60 | --count 2000] [--seed 1] [--atheris]

Without `--atheris` inputs are mutations of the seeds; with it coverage guides them (install atheris by hand; it is
not a dependency). An input that raises another error than fedplat's own, takes longer than `HANG_S`, or wants more
memory than `MEMORY_BYTES`, ends the process with 1 and is written to `tests/fuzz/found/TARGET-SHA1`; fix the code, and
move the file to `tests/fuzz/corpus/TARGET/`, with which every later run begins.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import random
import resource
import signal
import sys
import time
import traceback
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

if "--atheris" in sys.argv:  # it instruments what is imported within its context
    with importlib.import_module("atheris").instrument_imports(include=["fedplat", "fedplat_server"]):
        from fuzz import targets
else:
    from fuzz import targets
from hostile import attacks

FOUND = Path(__file__).resolve().parent / "found"
HANG_S = 10.0
"""CPU seconds that no input needs: time in which other programs have the cores does not count."""
MEMORY_BYTES = 512 * 2**20
"""How much the process may allocate on top of what it has before the first input."""


def limit_memory() -> None:
    """Makes an allocation fail that no correct code would try."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def too_long(_: int, __: FrameType | None) -> None:
    """Handles the signal of the timer."""
    raise TimeoutError(f"an input took more than {HANG_S:g} CPU seconds")


def guarded(name: str, data: bytes) -> None:
    """Feeds an input; keeps it and ends the process if it does harm."""
    signal.setitimer(signal.ITIMER_PROF, HANG_S)
    try:
        targets.feed(name, data)
    except BaseException:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        FOUND.mkdir(exist_ok=True)
        path = FOUND / f"{name}-{hashlib.sha1(data).hexdigest()}"
        path.write_bytes(data)
        traceback.print_exc()
        print(f"{name}: {len(data)} bytes did harm; they are in {path}", file=sys.stderr)
        raise SystemExit(1) from None
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)


def mutate(name: str, seconds: float, count: int, seed: int) -> int:
    """Feeds the seeds and mutations of them; returns the number of inputs."""
    rng, seeds = random.Random(seed), targets.seeds(name)
    end, number = time.monotonic() + seconds, 0
    for data in seeds:
        guarded(name, data)
    while number < count if count else time.monotonic() < end:
        data = rng.choice(seeds)
        for _ in range(rng.choice((1, 1, 2, 5))):
            data = attacks.mutated(rng, data)
        if rng.random() < 0.05:
            data = rng.randbytes(rng.randint(0, 500))
        guarded(name, data)
        number += 1
    return number + len(seeds)


def main(
    target: Annotated[str, typer.Argument(help=f"One of {', '.join(targets.TARGETS)}.")],
    seconds: Annotated[float, typer.Option(help="How long to go on.")] = 60.0,
    count: Annotated[int, typer.Option(help="How many inputs instead.")] = 0,
    seed: Annotated[int, typer.Option(help="What mutations are drawn from.")] = 1,
    atheris: Annotated[bool, typer.Option("--atheris", help="Let coverage lead.")] = False,
) -> None:
    """Fuzz a target."""
    if target not in targets.TARGETS:
        raise typer.BadParameter(f"expected one of {', '.join(targets.TARGETS)}")
    signal.signal(signal.SIGPROF, too_long)
    if atheris:
        _atheris(target, seconds)
    limit_memory()
    print(f"{target}: {mutate(target, seconds, count, seed)} inputs did no harm")


def _atheris(name: str, seconds: float) -> None:
    engine: Any = importlib.import_module("atheris")
    corpus = FOUND / f"corpus-{name}"
    corpus.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(targets.seeds(name)):
        (corpus / f"seed-{number}").write_bytes(data)
    limits = [f"-max_total_time={seconds:g}", "-rss_limit_mb=2048", f"-timeout={HANG_S:g}"]
    engine.Setup([sys.argv[0], str(corpus), *limits], functools.partial(guarded, name))
    engine.Fuzz()


if __name__ == "__main__":
    typer.run(main)
