"""The model, the text and the training loop of ``python -m amp_fx demo``."""
