"""A Flower app in PyTorch."""
