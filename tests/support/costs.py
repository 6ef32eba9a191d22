"""What tests cost: the CPU seconds of each one, with the processes that it starts, and the budget of the fast ones.

`tests/durations.json` holds what each module costs on a quiet machine. `make test-durations` writes it, and
`pytest --record-durations PATHS` updates it for some modules. Pytest runs the longest modules first. CPU seconds depend
on the machine and on its other work, so a fixed piece of work is timed in each run and compared with the recorded one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import resource
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NamedTuple, cast

import msgspec
import pytest

from support.order import module_of

ROOT = Path(__file__).parents[2]
FILE: Final = ROOT / "tests" / "durations.json"
BUDGET_CPU_S = 420.0
"""Of all tests that are not slow."""
BESIDE_CPU_S = 0.2
"""Of other programs for each CPU second of the run: beside more, caches and shared cores make each test dearer."""
LONGEST_CPU_S = 1.5
"""Of one test that is not slow, without the fixtures that it shares with others."""
_PROPERTY = "cost"
_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")


class ModuleCost(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the tests of a module cost together, and the dearest of the fast ones without shared fixtures."""

    fast_cpu_s: float = 0.0
    fast_wall_s: float = 0.0
    slow_cpu_s: float = 0.0
    slow_wall_s: float = 0.0
    longest_cpu_s: float = 0.0


class Durations(msgspec.Struct, frozen=True):
    """The recorded costs; `yardstick_s` is the CPU time of `measure_yardstick` on the machine that recorded them."""

    yardstick_s: float
    modules: dict[str, ModuleCost]


@dataclasses.dataclass(frozen=True)
class Cost:
    """The cost of one test; `own_cpu_s` is without imports and fixtures that later tests use, too."""

    test: str
    is_slow: bool
    cpu_s: float
    own_cpu_s: float
    wall_s: float


def read() -> Durations:
    """Return the recorded costs."""
    return msgspec.json.decode(FILE.read_bytes(), type=Durations)


def all_modules() -> list[str]:
    """Return the paths of all modules with tests."""
    return sorted(path.relative_to(ROOT).as_posix() for path in FILE.parent.rglob("test_*.py"))


def write(durations: Durations) -> None:
    """Write the recorded costs, with a line for each module."""
    lines = (f'    "{name}": {msgspec.json.encode(cost).decode()}' for name, cost in sorted(durations.modules.items()))
    text = ",\n".join(lines)
    FILE.write_text(f'{{\n  "yardstick_s": {durations.yardstick_s},\n  "modules": {{\n{text}\n  }}\n}}\n')


def measure_yardstick() -> float:
    """Return the CPU seconds of a fixed piece of work: the least of five tries."""
    tries: list[float] = []
    for _ in range(5):
        begin = time.process_time()
        digest = hashlib.sha256()
        for number in range(40_000):
            digest.update(json.dumps({"number": number, "text": str(number)}).encode())
        tries.append(time.process_time() - begin)
    return round(min(tries), 4)


def slowness() -> float:
    """Return how many times as long as on the recorded machine a piece of work takes here and now; at least 1."""
    return max(1.0, measure_yardstick() / read().yardstick_s)


def tree_cpu_s() -> float:
    """Return the CPU seconds of this process, of all processes that it has started, and of theirs."""
    of_ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + of_ended.ru_utime + of_ended.ru_stime + sum(map(_cpu_s, _children(os.getpid())))


def machine_cpu_s() -> float:
    """Return the CPU seconds of all processes of this machine since its start, as far as Linux tells."""
    user, nice, system, _idle, _waiting, *others = Path("/proc/stat").read_text().partition("\n")[0].split()[1:9]
    return sum(map(int, [user, nice, system, *others])) * _TICK_S


def _children(process: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the process has ended
        for thread in os.listdir(f"/proc/{process}/task"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # only the thread
                found += map(int, Path(f"/proc/{process}/task/{thread}/children").read_text().split())
    return found


def _cpu_s(process: int) -> float:
    """Return the CPU seconds of a process, and of its descendants."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return sum(map(int, fields[11:15])) * _TICK_S + sum(map(_cpu_s, _children(process)))


class Meter:
    """Measures each test in the process that runs it, and puts the result into its last report."""

    def __init__(self) -> None:
        self._begin_cpu_s = self._begin_s = self._shared_cpu_s = 0.0
        self._is_shared = False  # what runs now
        # The first test that needs a module pays for all.
        SourceFileLoader.exec_module = self._exec_apart(SourceFileLoader.exec_module)

    @contextlib.contextmanager
    def _sharing(self, clock: Callable[[], float]) -> Generator[None]:
        if self._is_shared:
            yield
            return
        self._is_shared, begin = True, clock()
        try:
            yield
        finally:
            self._is_shared = False
            self._shared_cpu_s += clock() - begin

    def _exec_apart(self, exec_module: Callable[..., None]) -> Any:
        def exec_and_measure(loader: SourceFileLoader, module: ModuleType) -> None:
            with self._sharing(time.process_time):
                exec_module(loader, module)

        return exec_and_measure

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self) -> Generator[None, object, object]:
        self._begin_cpu_s, self._begin_s, self._shared_cpu_s = tree_cpu_s(), time.perf_counter(), 0.0
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, object, object]:
        if fixturedef.scope == "function":
            return (yield)
        with self._sharing(tree_cpu_s):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, object, object]:
        if call.when == "teardown":
            # A process that is killed and never waited for takes its CPU seconds with it.
            cpu_s, wall_s = max(tree_cpu_s() - self._begin_cpu_s, 0.0), time.perf_counter() - self._begin_s
            cost = Cost(item.nodeid, _is_slow(item), cpu_s, cpu_s - self._shared_cpu_s, wall_s)
            item.user_properties.append((_PROPERTY, dataclasses.asdict(cost)))
        return (yield)


def costs_of(stats: Mapping[str, Sequence[Any]]) -> list[Cost]:
    """Return the costs of all tests of a run, of all its processes."""
    reports = (one for reports in stats.values() for one in reports if isinstance(one, pytest.TestReport))
    values = (value for report in reports if report.when == "teardown" for value in report.user_properties)
    return [Cost(**cast(dict[str, Any], value)) for name, value in values if name == _PROPERTY]


def sum_up(costs: Iterable[Cost], factor: float = 1.0) -> dict[str, ModuleCost]:
    """Return the costs of modules, multiplied by a factor."""
    by_module: defaultdict[str, list[Cost]] = defaultdict(list)
    for cost in costs:
        by_module[cost.test.partition("::")[0]].append(cost)

    def total(seconds: Iterable[float]) -> float:
        return round(factor * sum(seconds), 2)

    return {
        module: ModuleCost(
            fast_cpu_s=total(one.cpu_s for one in tests if not one.is_slow),
            fast_wall_s=total(one.wall_s for one in tests if not one.is_slow),
            slow_cpu_s=total(one.cpu_s for one in tests if one.is_slow),
            slow_wall_s=total(one.wall_s for one in tests if one.is_slow),
            longest_cpu_s=total([max((one.own_cpu_s for one in tests if not one.is_slow), default=0.0)]),
        )
        for module, tests in by_module.items()
    }


def longest_first(items: list[pytest.Item]) -> None:
    """Sort modules by the time that their tests take, so that no worker is left alone with a long one at the end.

    A module without a record comes first.
    """
    modules, seconds = read().modules, dict[str, float]()
    for module, is_slow in {(module_of(item), _is_slow(item)) for item in items}:
        cost = modules.get(module)
        wall_s = math.inf if cost is None else cost.slow_wall_s if is_slow else cost.fast_wall_s
        seconds[module] = seconds.get(module, 0.0) + wall_s
    items.sort(key=lambda item: -seconds[module_of(item)])


def _is_slow(item: pytest.Item) -> bool:
    return item.get_closest_marker("slow") is not None


class Verdict(NamedTuple):
    """What a whole run has cost, and a line for each part of the budget that it exceeds."""

    summary: str
    excesses: list[str]


def check_budget(costs: Iterable[Cost], run_cpu_s: float, slow: float, others_cpu_s: float = 0.0) -> Verdict:
    """Compare a whole run with the budget, on a machine that is `slow` times as slow as the recorded one.

    Only a run without slow tests can exceed it: it is charged all its CPU seconds, with the collection of its tests. In
    another run, processes that slow tests have started take part of the seconds of fast ones. One test may have twice
    its limit, and a run beside other programs, which took `others_cpu_s`, is not judged, since noise must not fail a
    run: `tests/suite/test_budget.py` checks the recorded seconds.
    """
    costs = list(costs)
    fast = [cost for cost in costs if not cost.is_slow]
    is_fast = len(fast) == len(costs)
    total_s = run_cpu_s if is_fast else sum(cost.cpu_s for cost in fast)
    excesses = [
        f"{cost.test}: {cost.own_cpu_s:.1f} CPU seconds; expected at most {LONGEST_CPU_S}, or the mark slow"
        for cost in fast
        if cost.own_cpu_s > 2.0 * LONGEST_CPU_S * slow
    ]
    if total_s > BUDGET_CPU_S * slow:
        excesses.append("the fast tests exceed their budget: docs/contributing.md, What runs when")
    summary = (
        f"{total_s:.0f} CPU seconds for {len(fast)} fast tests; the budget is {BUDGET_CPU_S:.0f} on the recorded "
        f"machine, which is {slow:.2f} times as fast as this one is now"
    )
    if is_fast and others_cpu_s > BESIDE_CPU_S * run_cpu_s:
        return Verdict(f"{summary}; not judged, as other programs took {others_cpu_s:.0f} CPU seconds beside it", [])
    return Verdict(summary, excesses if is_fast else [])


class Accountant:
    """Adds up the costs of a run, writes them down if asked to, and fails a whole run that exceeds the budget."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._lines: list[str] = []
        self._begin_others_s = machine_cpu_s() - tree_cpu_s()

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        reporter: Any = self._config.pluginmanager.get_plugin("terminalreporter")
        costs = costs_of(reporter.stats)
        is_whole = self._config.args_source is pytest.Config.ArgsSource.TESTPATHS
        if self._config.getoption("record_durations"):
            self._record(costs, is_whole)
        elif is_whole and costs:
            run_s = tree_cpu_s()
            found = check_budget(costs, run_s, slowness(), machine_cpu_s() - run_s - self._begin_others_s)
            self._lines += [found.summary, *found.excesses]
            if found.excesses and session.exitstatus == pytest.ExitCode.OK:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _record(self, costs: list[Cost], is_whole: bool) -> None:
        before, modules = read(), dict.fromkeys(all_modules(), ModuleCost())
        factor = before.yardstick_s / measure_yardstick()
        known = {name: cost for name, cost in before.modules.items() if name in modules and not is_whole}
        write(Durations(before.yardstick_s, modules | known | sum_up(costs, factor)))
        self._lines.append(
            f"{FILE.name}: recorded modules, in seconds of the first machine (this one times {factor:.2f})"
        )

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for line in self._lines:
            terminalreporter.write_line(line)


def add_option(parser: pytest.Parser) -> None:
    """Add the option that records costs."""
    parser.addoption(
        "--record-durations",
        action="store_true",
        help="write what the modules of this run cost into tests/durations.json, instead of checking the budget",
    )


def register(config: pytest.Config) -> None:
    """Measure tests in each process that runs some, and add up in the one that reports."""
    is_worker = hasattr(config, "workerinput")
    if is_worker or config.getoption("dist", "no") == "no":
        config.pluginmanager.register(Meter())
    if not is_worker:
        config.pluginmanager.register(Accountant(config))
