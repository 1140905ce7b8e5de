"""`latecomer advise`: findings about a scenario or a run, and strategies and settings to try."""
