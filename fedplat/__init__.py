"""fedplat: simulate a federated training, describe a job, and operate a server.

```python
from fedplat import simulate

print(simulate("digits"))
```

The names below are those that most programs need; each is loaded when it is first used, so `import fedplat` stays
light. All other names are imported from their own modules.
"""

import os

from fedplat._version import __version__

TYPE_CHECKING = False  # type checkers take it for that of `typing`, whose import would take longer than all of this
if TYPE_CHECKING:
    from fedplat.admin import AdminClient
    from fedplat.job import JobSpec, parse_job
    from fedplat.model import Parameters
    from fedplat.pytorch.training import Learner
    from fedplat.simulation import Dataset, Federation, Run, compare, simulate
else:

    def __getattr__(name: str) -> object:
        import importlib
        import sys

        modules = {
            "AdminClient": "fedplat.admin",
            "Dataset": "fedplat.simulation",
            "Federation": "fedplat.simulation",
            "JobSpec": "fedplat.job",
            "Learner": "fedplat.pytorch.training",
            "Parameters": "fedplat.model",
            "Run": "fedplat.simulation",
            "compare": "fedplat.simulation",
            "parse_job": "fedplat.job",
            "simulate": "fedplat.simulation",
        }
        if name not in modules:
            this = sys.modules[__name__]
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=this)
        try:
            value = globals()[name] = getattr(importlib.import_module(modules[name]), name)
        except ModuleNotFoundError as exc:
            if exc.name != "torch":
                raise
            from fedplat.errors import MissingExtraError
            from fedplat.extras import install_command

            raise MissingExtraError(f"{name} needs PyTorch; install it with: {install_command('torch')}") from exc
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


# gRPC reads this once, at its import. Its handlers for forks start threads in a child that was forked while a call ran,
# and abort it: a worker of a simulation, or of a DataLoader. No such child uses the gRPC of its parent.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
# gRPC's C library would write its own lines to stderr for each failed connection, besides our errors.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

__all__ = [
    "AdminClient",
    "Dataset",
    "Federation",
    "JobSpec",
    "Learner",
    "Parameters",
    "Run",
    "__version__",
    "compare",
    "parse_job",
    "simulate",
]
