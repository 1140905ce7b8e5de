"""An app for tests: a tiny network, devices that fail as they are told, and a log of what left."""
