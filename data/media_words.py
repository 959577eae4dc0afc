"""What is written for the private characters that stand for a sample's media in its text."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from data.errors import RowError
from data.labels import Ranges, gaps
from data.media import MediaRef
from data.rows import MEDIA_BASE, MEDIA_CHARACTER
from data.tokenised import Runs


@dataclass(frozen=True)
class Word:
    """What stands for a medium. text: with a placeholder for each of the runs, in their order."""

    text: str
    runs: Runs


def placed(media: Sequence[MediaRef]) -> list[tuple[int, MediaRef]]:
    """The media that have a place of their own in the text, with their ordinals; the sound of a video has
    its rows among the video's."""
    return [(ordinal, ref) for ordinal, ref in enumerate(media) if not ref.track]


def media_order(text: str, count: int) -> list[int]:
    """Ordinals of the media in the order in which they stand in a text."""
    order = [ord(match[0]) - MEDIA_BASE for match in MEDIA_CHARACTER.finditer(text)]
    if sorted(order) != list(range(count)):
        raise RowError(
            "chat template drops or repeats media", f"{count} media in the row, {len(order)} rendered"
        )
    return order


def put_words(
    text: str, targets: Ranges, literal: Ranges, words: Sequence[str]
) -> tuple[str, Ranges, Ranges]:
    """(text, targets, literal) with words for the private characters, in their order; ranges follow, literal
    ones leave the words out."""
    found = list(MEDIA_CHARACTER.finditer(text))
    positions = [match.start() for match in found]
    growth = [0]
    for word in words:
        growth.append(growth[-1] + len(word) - 1)

    def moved(ranges: Iterable[tuple[int, int]]) -> Ranges:
        return [
            (a + growth[bisect_left(positions, a)], b + growth[bisect_left(positions, b)]) for a, b in ranges
        ]

    holes = [(p, p + 1) for p in positions]
    literal = [gap for a, b in literal for gap in gaps(a, b, [hole for hole in holes if a <= hole[0] < b])]
    queue = iter(words)
    return MEDIA_CHARACTER.sub(lambda _: next(queue), text), moved(targets), moved(literal)
