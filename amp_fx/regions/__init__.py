"""The state at this point: autocast's state and policy, the module path, eager kernels, devices."""
