"""What passes work with: the nodes of captured graphs, their values, autocast's state at them."""
