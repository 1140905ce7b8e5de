"""Parts that several strategies use, one idea per file."""
