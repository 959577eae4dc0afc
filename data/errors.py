"""What can be wrong with one row, as opposed to with the configuration (`omni_ds.errors.UserError`)."""


class RowError(Exception):
    """A row that cannot be used.

    reason: short and the same for all rows with this problem (they are counted by it); detail: this row's
    case.
    """

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail


class MediaError(RowError):
    """A medium that cannot be read: at index time the row is skipped, at load time the sample loses its
    labels.
    """
