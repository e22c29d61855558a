"""``amp_fx.explain``: what was decided for each node of a model's graphs, and why.

In the order that data takes: ``running`` copies the model as fake tensors, ``recorder``
watches the backend, ``reading`` turns graphs into ``records``, ``totals``, ``table`` and
``diff`` sum them up.
"""
