"""The error that is shown to a user as one message, without a traceback."""

from collections.abc import Iterator
from contextlib import contextmanager


class UserError(ValueError):
    """Something the user can put right: the message says what was wrong, where, and what to do."""


@contextmanager
def writing(what: str) -> Iterator[None]:
    """Turn an OSError inside into a UserError: ``what`` (a file or folder) could not be written."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot write {what}: {error.strerror or error}; free space or change omni.output_dir"
        ) from None
