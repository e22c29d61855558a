"""Capabilities of this machine's devices."""
