"""Finds the precision of a training step, and losses of precision."""
