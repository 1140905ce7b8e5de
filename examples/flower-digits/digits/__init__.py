"""A Flower app that runs Latecomer's strategies and training on real nodes."""
