"""Regions in eager code: ``amp_fx.autocast``, functions of autograd, checkpoints."""
