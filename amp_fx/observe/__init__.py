"""The observer of a running step: its ops as events, their places, and the state put back."""
