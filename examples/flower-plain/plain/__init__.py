"""A Flower app with Latecomer on the server only."""
