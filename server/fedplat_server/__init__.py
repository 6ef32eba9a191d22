"""The server daemon of fedplat."""

import fedplat as fedplat  # before gRPC is imported, of which it sets an option

__version__ = "0.2.0.dev0"
