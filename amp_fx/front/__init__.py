"""The code around compiled graphs: ``amp_fx.compile``, ``autocast``, custom functions."""
