"""What moves time and bytes around the pure server."""
