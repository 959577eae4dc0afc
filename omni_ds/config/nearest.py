"""Guess which known name was meant."""

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str], count: int = 1) -> list[str]:
    """At most `count` of the `known` names that look like `name`, best first; the case does not matter."""
    by_lower = {candidate.lower(): candidate for candidate in sorted(known)}
    found = difflib.get_close_matches(name.lower(), list(by_lower), n=count, cutoff=0.6)
    return [by_lower[candidate] for candidate in found]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`did you mean x?`, or the list of all that is known."""
    known = sorted(known)
    found = nearest(name, known)
    return f"did you mean {found[0]}?" if found else f"known: {', '.join(known)}"
