"""Simulated devices in virtual time: speed, links, availability, faults and lateness."""
