"""Experiments: config, runner, metrics, files, comparison and report."""
