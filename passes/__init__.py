"""Graph passes, one file each, in pipeline order."""
