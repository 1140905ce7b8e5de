"""The server as a pure state machine: flat models, versions, messages, slots and hooks."""
