"""Models, text, training loop and generation of ``python -m amp_fx demo``."""
