"""Timings beside ``torch.compile`` under ``torch.autocast``: ``python -m amp_fx.bench``.

In the order in which a run passes them: ``settings`` (what was asked for), ``cases`` (which
models), ``contenders`` (who runs them), ``compare`` (one workload, all contenders; memory),
``timing`` (what is measured), ``report`` (table, JSON, bars).
"""
