"""What is in force here: autocast's state and policy, the module path, eager kernels, devices."""
