"""Compares amp_fx with ``torch.compile`` under ``torch.autocast``: ``python -m benchmarks``.

In the order of a run: ``workloads`` (the models), ``contenders`` (ways to run a model, and the
settings), ``comparison`` (all contenders on one workload), ``timing`` (samples).
"""
