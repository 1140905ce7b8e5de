"""The live page of a running or finished run."""
