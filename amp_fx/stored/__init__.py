"""``amp_fx.store_low``: converts weights to a low dtype in place."""
