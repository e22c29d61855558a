"""Finds where op tables and the installed torch's autocast disagree."""
