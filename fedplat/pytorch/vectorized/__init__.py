"""Local training on flat vectors: for simulation, where what surrounds a step takes longer than its arithmetic.

`layout` says where a module's parameters lie in one vector, `gradients` computes a step's gradients without the
bookkeeping of autograd, `descent` moves the weights, and `trainer` puts them together for one client. The results are
those of `fedplat.pytorch.training`, which trains any module, with any optimizer and precision.
"""
