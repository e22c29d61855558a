"""``amp_fx.draw``: pictures of explained graphs.

In the order of the data flow: ``boxes`` converts an explanation to a graph of boxes, ``folding``
reduces it, ``dot`` converts it to Graphviz, ``draw`` combines these steps, and ``page`` creates an
HTML page of the picture and the table.
"""
