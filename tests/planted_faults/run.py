"""Plants faults, one at a time, and shows whether tests catch them.

    python tests/planted_faults/run.py [--only PATTERN] [--checkout FOLDER] [--json FILE] [--all-tests]

The faults of `faults.toml` are planted in a copy of the checkout; the tests that a fault names run until one fails,
the fast ones first. At the end, the tests that caught a fault run without one: those that fail then as well do not
count, and the faults that they caught are tried again without them. Exits with 1 if a fault is not caught.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import json
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from planted_faults import catalog, checkout
from planted_faults.catalog import Fault

STAGES = {
    "fast": "not slow and not grid and not gpu",
    "slow": "slow and not grid and not gpu",
}
"""The marks of the tests of `make test`, and of those that `.ci/run` adds. Storms do not count: it runs some."""


@dataclasses.dataclass
class Result:
    """What became of one fault: `outcome` is caught, missed or absent (it cannot be planted)."""

    name: str
    area: str
    file: str
    outcome: str = "missed"
    by: str = ""
    stage: str = ""
    cpu_s: float = 0.0

    def line(self) -> str:
        """The result as one line."""
        text = {"caught": f"caught by {self.by} ({self.stage})", "missed": "MISSED", "absent": f"ABSENT: {self.by}"}
        return f"{self.name:32} {self.cpu_s:6.1f} CPU-s  {text[self.outcome]}"


def judge(root: Path, fault: Fault, skipped: Collection[str] = (), *, all_tests: bool = False) -> Result:
    """Plant one fault in a copy of a checkout, and run tests until one that is not skipped catches it."""
    result = Result(fault.name, fault.area, fault.file)
    if problem := fault.find_problem(root):
        result.outcome, result.by = "absent", problem
        return result
    options = ["-x", *(f"--deselect={test}" for test in skipped)]
    with checkout.planted(root, fault):
        for stage, marks, tests in _stages(root, fault, all_tests=all_tests):
            done = checkout.run_tests(root, tests, marks, options)
            result.cpu_s = round(result.cpu_s + done.cpu_s, 1)
            if done.failed:
                result.outcome, result.stage, result.by = "caught", stage, done.failed[0]
                break
    return result


def _stages(root: Path, fault: Fault, *, all_tests: bool) -> Iterator[tuple[str, str, list[str]]]:
    listed = checkout.find_tests(root, fault.tests)
    for stage, marks in STAGES.items():
        if listed:
            yield stage, marks, listed
    for stage, marks in STAGES.items() if all_tests else ():
        yield f"all {stage}", marks, ["tests"]


def find_unrelated(root: Path, results: Iterable[Result]) -> set[str]:
    """Return the tests that caught a fault and fail without it as well."""
    caught = sorted({one.by for one in results if one.outcome == "caught" and not one.by.startswith("(")})
    return set(checkout.run_tests(root, caught, "not gpu").failed) & set(caught) if caught else set()


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", action="append", metavar="PATTERN", help="name of a fault; may have * and be repeated"
    )
    parser.add_argument("--checkout", type=Path, default=catalog.ROOT, metavar="FOLDER", help="another checkout")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write results; results of other faults stay there")
    parser.add_argument("--all-tests", action="store_true", help="run all tests if those that are listed miss")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Run the faults; the exit status."""
    options = _parse(arguments)
    patterns = options.only or ["*"]
    faults = [one for one in catalog.read_faults() if any(fnmatch.fnmatch(one.name, each) for each in patterns)]
    results: dict[str, Result] = {}
    unrelated: set[str] = set()
    with checkout.copied(options.checkout.resolve()) as root:
        while faults:
            for number, fault in enumerate(faults, 1):
                results[fault.name] = judge(root, fault, unrelated, all_tests=options.all_tests)
                print(f"{number:3}/{len(faults)} {results[fault.name].line()}", flush=True)
                if options.json is not None:
                    _write(options.json, results.values())
            more = find_unrelated(root, [results[fault.name] for fault in faults])
            unrelated |= more
            faults = [fault for fault in faults if results[fault.name].by in more]
            if faults:
                print(f"these tests fail without a fault as well: {', '.join(sorted(more))}", flush=True)
    counts = Counter(one.outcome for one in results.values())
    print(", ".join(f"{number} {outcome}" for outcome, number in sorted(counts.items())))
    return 0 if counts["caught"] == len(results) else 1


def _write(path: Path, results: Iterable[Result]) -> None:
    earlier = json.loads(path.read_text("utf-8")) if path.exists() else []
    table = {one["name"]: one for one in earlier} | {one.name: dataclasses.asdict(one) for one in results}
    path.write_text(json.dumps(list(table.values()), indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
