"""The instruments that the parts of the daemon record into; `fedplat_server.metrics` serves them.

`catalogue` lists every metric, `labels` bounds the values of labels, and `instruments` holds the counters and
histograms. Recording takes about a microsecond and never fails, so parts record whether or not metrics are served.
"""

from fedplat_server.instruments.instruments import Instruments

__all__ = ["Instruments"]
