"""Cast policies of ops, what users change on top of them, and how they change a call."""
