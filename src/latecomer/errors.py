"""What a user can get wrong, said in one line."""


class BadInput(ValueError):
    """Bad usage, config or data: one line that says what, where and what is allowed. Exit code 2."""


class RunFailed(RuntimeError):
    """The run could not go on; what was done so far is on disk. Exit code 1."""
