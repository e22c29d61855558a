"""Finds in which precision a training step runs, and what is lost."""
