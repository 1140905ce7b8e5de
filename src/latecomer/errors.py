"""What a user can get wrong, said in one line."""


class BadInput(ValueError):
    """Bad usage, config or data, said in one line: what, where, what is allowed. Exit code 2."""


class RunFailed(RuntimeError):
    """The run could not go on; what was done so far is on disk. Exit code 1."""
