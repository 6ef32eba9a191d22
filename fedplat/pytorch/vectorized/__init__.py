"""Local training on flat vectors, for simulation, where the overhead of a step exceeds its arithmetic.

`layout` maps a module's parameters to one vector, `gradients` computes a step's gradients without the bookkeeping of
autograd, `sgd` updates the weights, and `trainer` combines them for one client. The results are those of
`fedplat.pytorch.training`, which trains any module, with any optimizer and precision.
"""
