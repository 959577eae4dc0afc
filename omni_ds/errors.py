"""The error that is shown to a user as one message, without a traceback."""


class UserError(ValueError):
    """Something the user can put right: the message says what was wrong, where, and what to do."""
