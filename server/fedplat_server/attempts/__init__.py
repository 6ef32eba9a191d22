"""Where the aggregate of an attempt is computed: in the daemon's own process, or by the ranks of the pool.

`recipe.py` is what it is made of, for both; `folding.py` says what both can do, `here.py` and `pooled.py` are the two.
"""
