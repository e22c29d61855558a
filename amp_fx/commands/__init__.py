"""The commands of ``python -m amp_fx``, one file each."""
