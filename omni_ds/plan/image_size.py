"""The size an image is resized to where a tower takes any: its own proportions, in whole blocks of patches.

The rule is the "smart resize" that Qwen2-VL made common (arXiv:2409.12191, section 2.1; ``smart_resize`` in
transformers): both sides the nearest multiple of a block; where the area then is too large or too small, the
sides are scaled by the root of (bound / area) and rounded down, or up, to multiples. In whole numbers here,
so that every machine finds the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt
from typing import Any

from omni_ds.errors import UserError

NAFLEX = "siglip2_vision_model"


@dataclass(frozen=True)
class Sizing:
    """How the images of an encoder are sized.

    block: side, in pixels, that both sides are multiples of: a patch, or the patches that become one feature
    row. min_pixels, max_pixels: of :func:`smart_size`. max_blocks: instead of both, as many blocks as fit
    into this number, by the rule of SigLIP2's NaFlex processor.
    """

    block: int
    min_pixels: int | None = None
    max_pixels: int | None = None
    max_blocks: int | None = None


def smart_size(
    height: int, width: int, block: int, min_pixels: int | None = None, max_pixels: int | None = None
) -> tuple[int, int]:
    """(height, width) in pixels after resizing, multiples of ``block`` of at least one block.

    The area is never more than ``max_pixels`` (at least one block). It is not less than ``min_pixels`` unless
    the multiples that keep the proportions leap over the range, which needs max_pixels < 4 * min_pixels.
    An image so long that its shorter side would vanish keeps one block of it and at most the length that the
    bound allows.
    """
    rows, columns = max(1, round(height / block)), max(1, round(width / block))
    lowest, highest = _blocks(min_pixels, max_pixels, block)
    if rows * columns < lowest:
        # ceil(height * root(lowest / area) / block), and the same of the width
        rows = _root_up(height * min_pixels, width * block**2)
        columns = _root_up(width * min_pixels, height * block**2)
    if highest is not None and rows * columns > highest:
        rows = max(1, isqrt(height * max_pixels // (width * block**2)))
        columns = max(1, isqrt(width * max_pixels // (height * block**2)))
        rows, columns = min(rows, highest), min(columns, highest)  # only where the other one is 1
    return rows * block, columns * block


def _blocks(min_pixels: int | None, max_pixels: int | None, block: int) -> tuple[int, int | None]:
    """Fewest and most whole blocks between the bounds."""
    area = block * block
    return -(-(min_pixels or 1) // area), None if max_pixels is None else max_pixels // area


def _root_up(numerator: int, denominator: int) -> int:
    """ceil(sqrt(numerator / denominator)) of positive numbers."""
    return isqrt(-(-numerator // denominator) - 1) + 1


def image_sizing(where: str, encoder: Any, geometry: Any, processor: Any = None) -> Sizing | None:
    """How an encoder's section of the configuration wants its images sized; None: all to one size.

    geometry: of its tower (``model_type, patch, image``). processor: of HF; without bounds, a NaFlex one says
    how many patches an image has (else: as many as the tower has positions). UserError when no whole number
    of blocks lies between the bounds.
    """
    settings, projector = encoder.processor, encoder.projector
    factor = projector.factor if projector.reduction == "pixel_shuffle" else 1
    block = geometry.patch * factor
    low, high = settings.min_pixels, settings.max_pixels
    if low is None and high is None:
        if geometry.model_type != NAFLEX:
            return None
        patches = getattr(processor, "max_num_patches", (geometry.image // geometry.patch) ** 2)
        if patches < factor**2:
            raise UserError(
                f"{where}.projector.factor: {factor} x {factor} patches are more than the {patches} of an "
                "image; use a smaller factor, or set processor.max_pixels"
            )
        return Sizing(block, max_blocks=patches // factor**2)
    fewest, most = _blocks(low, high, block)
    if most is not None and most < fewest:
        least, bound = max(fewest, 1) * block**2, f" and min_pixels {low}" if low else ""
        raise UserError(
            f"{where}.processor.max_pixels: {high}{bound} leave no room for an image of whole blocks of "
            f"{block} x {block} pixels (patch times projector.factor); use at least {least}"
        )
    return Sizing(block, low, high)
