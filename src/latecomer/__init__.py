"""Latecomer: asynchronous federated learning that does not leave slow devices behind."""

__version__ = "0.1.0"
