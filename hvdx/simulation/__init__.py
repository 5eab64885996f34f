"""Simulation of a training on many workers in one process: the real exchanges and codecs, with a virtual clock.

`network` takes the seconds of a transfer from the cost model of `hvdx advise`. `clock` keeps the time of each rank, and
`ranks` has communicators that move it. `workloads` has the models, and `training` trains one under one strategy.
"""
