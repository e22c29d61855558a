"""``amp_fx.draw``: pictures of explained graphs.

In the order that data takes: ``boxes`` makes a graph of boxes from an explanation, ``zoom``,
``folding`` and ``collapse`` make it small, ``dot`` writes it as Graphviz does, ``draw`` puts
these together and ``page`` makes an HTML page of the result.
"""
