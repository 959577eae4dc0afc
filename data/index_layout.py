"""How the rows of a source are dealt to blocks: a function of their number alone.

A block is what is measured, published and first drawn from together. Blocks interleave: chunk after chunk of
neighbouring rows goes to one block after the other, so that each block is a cross-section of the whole file
and a run that has only the first ones does not learn from the file's beginning alone.
"""

from dataclasses import dataclass

BLOCK_ROWS = 16384  # at least; a smaller set is one block, in the order of the file
MAX_BLOCKS = 128  # an open block is an open file
CHUNK = 64  # rows measured by a process at a time


@dataclass(frozen=True)
class Layout:
    """rows: of the source, counted before anything is known about them."""

    rows: int
    blocks: int

    @classmethod
    def of(cls, rows: int) -> "Layout":
        return cls(rows, max(1, min(rows // BLOCK_ROWS, MAX_BLOCKS)))

    def chunks(self, block: int) -> list[range]:
        """Rows of a block in the order in which they are numbered."""
        starts = range(block * CHUNK, self.rows, self.blocks * CHUNK)
        return [range(start, min(start + CHUNK, self.rows)) for start in starts]


def block_name(block: int) -> str:
    return f"block-{block:05d}.safetensors"
