"""An app for tests: a small network, devices with injected faults, and a record of replies."""
