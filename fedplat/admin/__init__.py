"""The operator's API of a server, for programs. The command `fedplat` is built on it.

>>> from fedplat.admin import AdminClient, profile
>>> with AdminClient(profile.load(Path("admin.toml"))) as client:  # doctest: +SKIP
...     for job in client.list_jobs():
...         print(job.name, job.round, job.num_rounds)
"""

from fedplat.admin.client import AdminClient
from fedplat.admin.profile import Profile
from fedplat.admin.submission import ProgressCallback

__all__ = ["AdminClient", "Profile", "ProgressCallback"]
