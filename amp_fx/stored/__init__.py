"""Weights stored low in place: what reads them, what may be stored, what was done."""
