"""Automatic mixed precision as a compiler pass for PyTorch."""
