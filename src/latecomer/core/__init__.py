"""The pure heart: flat models, versions, messages, the five slots and the server."""
