"""Tools for passes: nodes of captured graphs, their values, and autocast's state at them."""
