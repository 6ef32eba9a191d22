"""The server daemon of fedplat."""

__version__ = "0.1.0"
