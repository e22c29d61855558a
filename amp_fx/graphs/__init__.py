"""Utilities for passes: nodes of captured graphs, their values, and their autocast state."""
