"""Jobs in each phase."""

from __future__ import annotations

from fedplat.rounds.events import (
    JobAction,
)
from support.rounds.driver import Driver, make_job, make_spec

START, PAUSE, RESUME, CANCEL = JobAction.START, JobAction.PAUSE, JobAction.RESUME, JobAction.CANCEL


def drafted() -> Driver:
    return Driver()


def selecting() -> Driver:
    return Driver().start(1)


def collecting() -> Driver:
    driver = Driver(make_job(spec=make_spec(goal=3))).start(3)
    driver.report("c0")
    driver.upload("c1")
    return driver


def committing() -> Driver:
    driver = Driver().start(2)
    driver.report("c0", "c1")
    return driver


def backing_off() -> Driver:
    driver = Driver().start(2)
    driver.give_up("c0", "c1")
    return driver


def paused() -> Driver:
    driver = collecting()
    driver.operate(PAUSE)
    return driver


def paused_while_committing() -> Driver:
    driver = committing()
    driver.operate(PAUSE)
    return driver


def completed() -> Driver:
    driver = Driver(make_job(spec=make_spec(rounds=1))).start(2)
    driver.play_round()
    return driver
