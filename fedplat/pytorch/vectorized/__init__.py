"""Local training on flat vectors, for simulation, where the overhead of a step exceeds its arithmetic.

`layout` maps a module's parameters to one vector, `vmap_gradients` computes gradients without the bookkeeping of
autograd, `trainer` trains one client, and `batched` many at once. The results are those of
`fedplat.pytorch.training`, which trains any module, with any optimizer and precision.
"""
