"""Code that runs on a device: models, local training, privacy, personalisation, the client."""
