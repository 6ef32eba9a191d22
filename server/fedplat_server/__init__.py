"""The server daemon of fedplat."""

__version__ = "0.2.0.dev0"
