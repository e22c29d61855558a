"""``amp_fx.compile``: the code around compiled graphs."""
