"""Checks of new devices, and C++ that registers their autocast."""
