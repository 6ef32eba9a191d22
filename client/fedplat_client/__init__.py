"""The client SDK of fedplat: training stays where the data is.

```python
from fedplat_client import Client, TrainResult

client = Client("fed.example.org:7443", population="demo", labels={"region": "eu"}, data_dir="~/.fedplat")

@client.trainer("digits")
def train(task):
    weights = task.parameters  # named views of one flat buffer
    ...
    task.progress(0.5)  # raises Cancelled when the server says stop
    return TrainResult(parameters=weights, num_examples=100, metrics={"loss": 0.1})

client.run()
```
"""

from fedplat.errors import MissingExtraError
from fedplat.model import Parameters
from fedplat_client._version import __version__
from fedplat_client.client import Client
from fedplat_client.errors import (
    CallRefusedError,
    Cancelled,
    ClientError,
    CredentialError,
    DataDirectoryError,
    EnrolmentError,
    IncompatibleServerError,
    ServerError,
    ServerUnavailableError,
    TransferError,
)
from fedplat_client.options import ClientOptions
from fedplat_client.task import EvaluateResult, Task, TrainResult

__all__ = [
    "CallRefusedError",
    "Cancelled",
    "Client",
    "ClientError",
    "ClientOptions",
    "CredentialError",
    "DataDirectoryError",
    "EnrolmentError",
    "EvaluateResult",
    "IncompatibleServerError",
    "MissingExtraError",
    "Parameters",
    "ServerError",
    "ServerUnavailableError",
    "Task",
    "TrainResult",
    "TransferError",
    "__version__",
]
