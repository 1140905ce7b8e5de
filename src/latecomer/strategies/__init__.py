"""Strategies: those of papers, the parts that several use, and the default strategy."""
