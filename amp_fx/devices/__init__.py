"""Reports what the devices of this machine can do."""
