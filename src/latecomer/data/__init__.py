"""Data sources, and how their examples come to lie on devices."""
