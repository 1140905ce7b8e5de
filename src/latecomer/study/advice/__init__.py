"""What dominates in a scenario or a run, and which strategy to try."""
