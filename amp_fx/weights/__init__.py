"""Cache of values computed from weights."""
