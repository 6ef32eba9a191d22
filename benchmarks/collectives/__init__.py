"""Ring, star, tree and shared memory implementations of collectives, to compare with Gloo and NCCL (`compare.py`)."""
