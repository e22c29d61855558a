"""``amp_fx.compile``, and the modules that it returns."""
