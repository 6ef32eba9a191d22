"""What holds for all tests."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Generator
from pathlib import Path

import hypothesis
import pytest

from faults import table
from support import costs, order, process_logs, storm

# Threads that wait for each other on busy cores make small matrices many times slower. Libraries read these variables
# when they are imported, here and in each process that a test starts.
os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")

# A job in the background of a shell ignores SIGINT, one of nohup SIGHUP, and so would all processes that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Neither how long an example takes nor how long it takes to draw one says anything about the code.
hypothesis.settings.register_profile("tests", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("tests")

LATE_MODULES = frozenset(
    {
        "test_adapters.py",
        "test_exact_lora.py",
        "test_huggingface.py",
        "test_language_models.py",
        "test_model_export.py",
        "test_tuning.py",
    }
)
"""They import transformers and peft."""


def pytest_addoption(parser: pytest.Parser) -> None:
    costs.add_option(parser)
    parser.addoption("--shuffle", type=int, metavar="SEED", help="run the modules in an order drawn from this seed")
    parser.addoption(
        "--fast-only", action="append", default=[], metavar="MODULE", help="leave out the slow tests of this module"
    )


def pytest_configure(config: pytest.Config) -> None:
    costs.register(config)
    config.pluginmanager.register(process_logs)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove variables that tests have set in this process, and that would change the programs that others start.

    flwr sets the first one when it is imported, and a pool that runs in this process the second one.
    """
    for name in ("GRPC_VERBOSITY", "PYTHONSAFEPATH"):
        monkeypatch.delenv(name, raising=False)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out modules of slow tests alone whose imports take 10 seconds, if the run has no slow tests."""
    has_slow = "not slow" not in config.option.markexpr
    return None if has_slow or collection_path.name not in LATE_MODULES else True


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the collector of garbage away from the modules of all tests, which live as long as the process.

    flwr collects garbage for each message that it reads, which otherwise takes longer than a test of a strategy.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    fast_only: list[str] = config.option.fast_only
    config.hook.pytest_deselected(items=order.take_out_slow(items, fast_only))
    table.note_rows(items)
    if (seed := config.getoption("--shuffle")) is not None:
        order.shuffle_modules(items, seed)
    elif hasattr(config, "workerinput"):
        costs.longest_first(items)


def pytest_report_header() -> str:
    return storm.header()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if line := storm.summary(terminalreporter.stats):
        terminalreporter.write_line(line)
