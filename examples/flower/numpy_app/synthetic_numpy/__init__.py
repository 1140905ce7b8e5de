"""A Flower app in numpy."""
