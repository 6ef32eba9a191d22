"""The client SDK of fedplat: training stays where the data is.

```python
from fedplat_client import Client, TrainResult

client = Client.from_ticket(labels={"region": "eu"}, data_dir="~/.fedplat")  # FEDPLAT_TICKET, at the first start

@client.trainer("digits")
def train(task):
    weights = task.parameters  # named views of one flat buffer
    ...
    task.progress(0.5)  # raises Cancelled when the server stops the task
    return TrainResult(parameters=weights, num_examples=100, metrics={"loss": 0.1})

client.run()
```

The names below are loaded when they are first used, so that the command can handle Ctrl-C before the imports are done.
"""

import sys

import fedplat as fedplat  # before gRPC is imported, of which it sets an option
from fedplat_client._version import __version__

TYPE_CHECKING = False  # type checkers take it for that of `typing`
if TYPE_CHECKING:
    from fedplat.errors import MissingExtraError, PrivacyLimitError, TicketError
    from fedplat.model import Parameters
    from fedplat_client._state.privacy_ledger import PrivacyLimit
    from fedplat_client.client import Client
    from fedplat_client.errors import (
        CallError,
        CallRefusedError,
        Cancelled,
        ClientError,
        DataDirectoryError,
        EnrollmentError,
        FencedError,
        IdentityError,
        IncompatibleServerError,
        ListenerError,
        RevokedError,
        ServerUnavailableError,
        TransferError,
        UnknownClientError,
    )
    from fedplat_client.options import ClientOptions
    from fedplat_client.task import EvaluateResult, Task, TaskOutcome, TrainResult
else:
    _MODULES = ("fedplat_client.errors", "fedplat_client.task", "fedplat_client.options", "fedplat_client.client")
    _OTHERS = ("fedplat.errors", "fedplat.model", "fedplat_client._state.privacy_ledger")

    def __getattr__(name: str) -> object:
        import importlib

        for module in (*_MODULES, *_OTHERS) if name in __all__ else ():
            found = importlib.import_module(module)
            if hasattr(found, name):
                value = globals()[name] = getattr(found, name)
                return value
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=sys.modules[__name__])

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


__all__ = [
    "CallError",
    "CallRefusedError",
    "Cancelled",
    "Client",
    "ClientError",
    "ClientOptions",
    "DataDirectoryError",
    "EnrollmentError",
    "EvaluateResult",
    "FencedError",
    "IdentityError",
    "IncompatibleServerError",
    "ListenerError",
    "MissingExtraError",
    "Parameters",
    "PrivacyLimit",
    "PrivacyLimitError",
    "RevokedError",
    "ServerUnavailableError",
    "Task",
    "TaskOutcome",
    "TicketError",
    "TrainResult",
    "TransferError",
    "UnknownClientError",
    "__version__",
]
