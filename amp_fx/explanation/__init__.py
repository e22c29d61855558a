"""``amp_fx.explain``: decisions on each node of a model's graphs, with reasons.

In the order of the data flow: ``running`` copies the model with fake tensors, ``recorder`` observes
the backend, ``reading`` converts graphs to ``records``, and ``table`` and ``diff`` present them.
"""
