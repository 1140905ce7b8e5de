"""A real federation on Flower's own processes: making an app, running it, keeping it alive."""
