"""``amp_fx.accuracy`` and ``amp_fx.search``: which op hurts, and its repair."""
