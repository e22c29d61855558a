"""Private names of torch that amp_fx uses, by area.

Other folders import torch's private names only from here, so a new version of torch breaks this
folder first. ``tests/torch_private`` tests the assumptions about what they do.

Importing Dynamo or inductor takes seconds: import from ``dynamo``, ``aot_autograd``, ``inductor``
and ``inductor_build`` inside functions.
"""
