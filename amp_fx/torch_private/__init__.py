"""Private names of torch that amp_fx uses, by area.

Other folders import torch's private names from here alone, so a new version of torch breaks this
folder first. ``tests/torch_private`` has a test for each name that says what is relied on.

Modules that import Dynamo or inductor take seconds to import: import from ``dynamo``,
``aot_autograd``, ``inductor`` and ``inductor_build`` inside functions.
"""
