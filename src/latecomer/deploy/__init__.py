"""Flower apps and federations: writing an app, running it locally, keeping nodes running."""
