"""``amp_fx.explain``: decisions on each node of a model's graphs, with reasons.

In the order of the data flow: ``running`` captures and rewrites a copy of the model with fake
tensors, ``captured`` plans what the code of its graphs would cache, ``reading`` converts graphs to
``records``, and ``explanation`` and ``table`` present them. ``network`` and ``model_explorer``
convert them for other tools.
"""
