"""A process that saves jobs forever, and says after each save what it saved; test_crash.py kills it."""

from __future__ import annotations

import asyncio
import sys

from fedplat_server.database.store import open_store
from support.store.driver import Driver, eventful


class _Talking(Driver):
    async def check(self) -> None:
        for job_id, job in self.coordinator.jobs.items():
            print(job_id, job.revision, flush=True)


async def main(database: str) -> None:
    store = await open_store(database)

    async def one(name: str) -> None:
        number = 0
        while True:
            number += 1
            await eventful(_Talking(store, f"{name} {number} "), f"{name}-{number}")

    await asyncio.gather(*(one(name) for name in "abc"))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
