"""A Flower app in scikit-learn."""
