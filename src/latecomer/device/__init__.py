"""What runs on a device: models, local training, and the client around them."""
