"""Side files of a checkpoint, in a folder or from the hub's cache."""

from pathlib import Path


def side_file(path: str, name: str) -> Path | None:
    """Where file ``name`` of a checkpoint is; None where it has none, or none can be asked for now."""
    from transformers.utils import cached_file

    file = cached_file(
        path,
        name,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return None if file is None else Path(file)
