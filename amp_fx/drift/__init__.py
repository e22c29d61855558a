"""Where op tables and the installed torch's autocast disagree."""
