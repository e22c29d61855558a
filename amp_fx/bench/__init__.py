"""Compares amp_fx with ``torch.compile`` under ``torch.autocast``: ``python -m amp_fx.bench``.

In the order of a run: ``settings`` (the options), ``cases`` (the models), ``contenders`` (ways to
run a model), ``compare`` (all contenders on one workload), ``timing`` (samples), ``report`` (table,
JSON and plot).
"""
