"""What the devices of this machine can do."""
