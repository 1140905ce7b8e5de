"""The default strategy, `latecomer`, and the parts that only it uses."""
