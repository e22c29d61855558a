"""Regions in eager code: ``amp_fx.autocast``, autograd functions, checkpoints."""
