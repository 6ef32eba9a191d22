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
"""

from fedplat.errors import MissingExtraError, PrivacyLimitError, TicketError
from fedplat.model import Parameters
from fedplat_client._state.privacy_ledger import PrivacyLimit
from fedplat_client._version import __version__
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
from fedplat_client.task import EvaluateResult, Task, TrainResult

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
    "TicketError",
    "TrainResult",
    "TransferError",
    "UnknownClientError",
    "__version__",
]
