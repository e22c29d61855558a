"""``amp_fx.accuracy``, ``amp_fx.search`` and ``amp_fx.watch``: which op hurts, and its repair."""
