"""Ctrl-C while a call is started."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from fedplat.admin.connection import defer_interrupt


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_waits_for_the_end_of_the_block() -> None:
    before, done = signal.getsignal(signal.SIGINT), list[str]()

    def work() -> None:
        with defer_interrupt():
            interrupt()
            done.append("started")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["started"]
    assert signal.getsignal(signal.SIGINT) is before


def test_an_error_is_not_hidden_without_an_interrupt() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(ValueError, match="refused"), defer_interrupt():
        raise ValueError("refused")
    assert signal.getsignal(signal.SIGINT) is before


def test_an_ignored_interrupt_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with defer_interrupt():
            interrupt()
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_have_no_handler() -> None:
    done = list[str]()

    def work() -> None:
        with defer_interrupt():
            done.append("started")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == ["started"]
