"""The operator's API of a server, for programs. The command `fedplat` is built on it.

>>> from fedplat.admin import AdminClient, profile
>>> with AdminClient(profile.load(Path("admin.toml"))) as client:  # doctest: +SKIP
...     for job in client.list_jobs():
...         print(job.name, job.round, job.num_rounds)

The names below are loaded when they are used: a command that needs no server does not load gRPC.
"""

TYPE_CHECKING = False  # as in fedplat/__init__.py
if TYPE_CHECKING:
    from fedplat.admin.client import AdminClient
    from fedplat.admin.profile import Profile
    from fedplat.admin.submission import ProgressCallback
else:

    def __getattr__(name: str) -> object:
        import importlib

        modules = {"AdminClient": "client", "Profile": "profile", "ProgressCallback": "submission"}
        if name not in modules:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
        value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{modules[name]}"), name)
        return value


__all__ = ["AdminClient", "Profile", "ProgressCallback"]
