"""A Flower app: the same strategy and devices as in a simulation, on real nodes."""
