"""Simulates servers, clients and faults from seeds: `simulate.py --seeds 50`. Exit status 1 if one finds a bug.

A failure prints its seed and how to repeat it. The same seed is the same simulation, with the same code.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

_SETTINGS = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "GRPC_VERBOSITY": "NONE"}


def main() -> int:
    options = _parse()
    if any(os.environ.get(name) != value for name, value in _SETTINGS.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **_SETTINGS})
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from support.fault_simulation import ambient

    ambient.install()  # before the server is imported
    from support.crash import points
    from support.fault_simulation import pool

    results: list[dict[str, Any]] = []
    for result in pool.run_seeds(range(options.first, options.first + options.seeds), options.jobs, options.bug):
        results.append(result)
        _show(result, options)
        if result["findings"] and options.until_failure:
            break
    failed = sorted(result["seed"] for result in results if result["findings"])
    if options.json:
        json.dump({"failed": failed, "results": results}, sys.stdout)
    else:
        _summarize(results, points.all_points(), failed)
    return 1 if failed else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=50, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="how many at a time")
    parser.add_argument("--bug", default="", help="a bug of support/fault_simulation/planted.py to be found")
    parser.add_argument("--until-failure", action="store_true", help="end with the first seed that fails")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.add_argument("--last", type=int, default=30, help="how many events of a failure to print")
    return parser.parse_args()


def _show(result: dict[str, Any], options: argparse.Namespace) -> None:
    if not result["findings"]:
        return
    shown = [result["plan"], "the last events:", *result["last"][-options.last :], *result["findings"]]
    bug = f" --bug {options.bug}" if options.bug else ""
    again = f"repeat it with: {sys.executable} {sys.argv[0]} --first {result['seed']} --seeds 1{bug}"
    print(*shown, again, "", sep="\n", file=sys.stderr)


def _summarize(results: list[dict[str, Any]], points: list[str], failed: list[int]) -> None:
    """Prints what was reached."""
    happened, reached = Counter[str](), Counter[str]()
    for result in results:
        happened.update(result["happened"])
        reached.update(result["reached"])
    for name, count in sorted(happened.items()):
        print(f"{name:<50}{count:>8}")
    print(f"crash points reached: {sum(reached[point] > 0 for point in points)} of {len(points)}")
    print("not reached:", *(point for point in points if not reached[point]))
    cpu_s = [result["cpu_s"] for result in results]
    print(f"{len(results)} seeds, {sum(cpu_s):.1f} CPU-seconds, at most {max(cpu_s):.2f} for one")
    print(f"failed: {failed}" if failed else "no seed failed")


if __name__ == "__main__":
    sys.exit(main())
