"""A Flower app whose devices know nothing of Latecomer."""
