"""Which op is cast how: policies, what users change on top of them, what it does to a call."""
