"""Engines, which drive the pure server: in virtual time, or over real nodes."""
