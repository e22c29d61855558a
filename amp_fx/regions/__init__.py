"""Ambient state: autocast's flags and policy, the modules around a call, registered ops."""
