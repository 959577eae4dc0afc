"""An encoder in numbers: what the plan has to know of it, from a plain dict of its HF config.

Every quantity is an exact int, so that all ranks compute the same plan. One record serves both families:

- ``vit``: SigLIP, SigLIP2 NaFlex, CLIP, DINOv2 (with and without registers). An item is one image, one
  segment of ``prefix`` (CLS, registers) + grid tokens.
- ``whisper``: the encoder half of Whisper. An item is a clip of mel frames, cut into windows of ``2 *
  max_source_positions`` frames; each window is a segment. The second convolution halves the frames (rounding
  up).

FLOPs count a multiply-add as two and leave out norms, activations and softmax.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd, isqrt
from typing import TYPE_CHECKING, Any

from omni_ds.errors import UserError
from omni_ds.plan.encoder_geometry import Geometry, read_geometry, tower_type
from omni_ds.plan.image_size import image_sizing
from omni_ds.plan.shards import even_bounds

if TYPE_CHECKING:
    from omni_ds.plan.sample import Item

_MODALITY = {"vit": "image", "whisper": "audio"}


@dataclass(frozen=True)
class EncoderMeta:
    """Sizes of one tower and its projector. ``layers`` are those built: up to the feature layer.

    ``prefix`` counts tokens before the patches, ``keep_prefix`` says whether they become features;
    ``mlp_matrices`` is 3 for gated MLPs. ``image``: side of the square that the position embeddings are made
    for. ``native``: images have their own sizes, of ``max_pixels`` at most (0: no bound is set). ``video``:
    the tower takes videos beside its images. ``levels``: outputs of ``out_hidden`` beside a row's own that go
    into later layers of the LLM (deepstack). Fields of the other family are 0.
    """

    name: str
    modality: str
    family: str
    model_type: str
    hidden: int
    layers: int
    heads: int
    intermediate: int
    mlp_matrices: int
    reduction: str
    factor: int
    projector_hidden: int
    out_hidden: int
    tower_trainable: bool
    projector_trainable: bool
    tower_parameters: int
    patch: int = 0
    image: int = 0
    channels: int = 0
    prefix: int = 0
    keep_prefix: bool = False
    mels: int = 0
    positions: int = 0
    pad_to_window: bool = False
    native: bool = False
    max_pixels: int = 0
    video: bool = False
    levels: int = 0

    @classmethod
    def from_config(
        cls, name: str, encoder: Any, hf_config: Mapping[str, Any], llm_hidden: int
    ) -> EncoderMeta:
        """Read an encoder from its section of the config and its HF config as a dict.

        ``encoder`` has the attributes of ``omni_ds.config.EncoderConfig``. Raises UserError on an
        architecture that is not supported and on geometry that does not work out (grid against pixel-shuffle
        factor).
        """
        from omni_ds.plan.towers import PROJECTORS, TOWERS  # of subclasses of this class

        kind = PROJECTORS.get(encoder.projector.type) or TOWERS.get(tower_type(hf_config))
        if kind is not None:
            return kind.from_config(name, encoder, hf_config, llm_hidden)
        where = f"omni.encoders.{name}"
        geometry = read_geometry(where, encoder, hf_config)
        projector = encoder.projector
        sizing = image_sizing(where, encoder, geometry) if geometry.family == "vit" else None
        keep_prefix = geometry.family == "vit" and encoder.feature_select == "full"
        meta = cls(
            name=name,
            modality=encoder.modality or _MODALITY[geometry.family],
            reduction=projector.reduction,
            factor=projector.factor if projector.reduction != "none" else 1,
            projector_hidden=projector.hidden_size or llm_hidden,
            out_hidden=llm_hidden,
            tower_trainable=not encoder.freeze,
            projector_trainable=not projector.freeze,
            keep_prefix=keep_prefix and geometry.prefix > 0,
            native=sizing is not None,
            max_pixels=(sizing and sizing.max_pixels) or 0,
            **{field: getattr(geometry, field) for field in Geometry.__dataclass_fields__},
        )
        meta._check(where)
        return meta

    def _check(self, where: str) -> None:
        expected = _MODALITY[self.family]
        if self.modality != expected:
            raise UserError(
                f'{where}.modality is "{self.modality}", but {self.model_type} encodes {expected}: '
                f'set it to "{expected}"'
            )
        if self.factor < 1:
            raise UserError(f"{where}.projector.factor is {self.factor}: it must be at least 1")
        if self.reduction == "pixel_shuffle":
            if self.family != "vit" or self.keep_prefix:
                raise UserError(
                    f"{where}.projector.reduction pixel_shuffle needs a grid of patches: use frame_stack for "
                    'audio, and feature_select "patch" for images'
                )
            grid = self.factor if self.native else self.image // self.patch
            self._check_grid(grid, grid)

    def _check_grid(self, rows: int, columns: int) -> None:
        if self.reduction != "pixel_shuffle" or not (rows % self.factor or columns % self.factor):
            return
        legal = [f for f in range(2, min(rows, columns) + 1) if rows % f == 0 and columns % f == 0]
        nearest = min(legal, key=lambda f: abs(f - self.factor)) if legal else None
        way_out = f"{nearest} does" if nearest else "no factor does: use reduction none or another image size"
        raise UserError(
            f"omni.encoders.{self.name}: {rows} x {columns} patch grid does not divide by pixel_shuffle "
            f"{self.factor}; {way_out}"
        )

    @property
    def modalities(self) -> tuple[str, ...]:
        """Media that the encoder takes, its main one first."""
        return (self.modality, "video") if self.video else (self.modality,)

    @property
    def window(self) -> int:
        """Mel frames of a full Whisper window."""
        return 2 * self.positions

    @property
    def segments_per_slice(self) -> int:
        """Of how many segments a part of an item must consist, so that no feature row needs tokens of two
        parts; 0: segments cannot be told apart (an image is one)."""
        if self.family != "whisper":
            return 0
        return self.factor // gcd(self.factor, self.positions)

    def part_of(self, shape: Sequence[int], first: int, count: int) -> tuple[int, tuple[int, ...]]:
        """(where segments [first, first + count) of an item begin along its first side, shape of them
        alone)."""
        start = first * self.window
        return start, (min(shape[0] - start, count * self.window),)

    @property
    def shortest_part(self) -> int:
        """(Mel) frames below which the end of an item cannot be a part of its own."""
        return 1

    @property
    def sliceable(self) -> bool:
        """Whether items can be cut inside a segment, for ranks that attend together."""
        return self.family == "vit"

    def slices(self, shape: Sequence[int], ranks: int) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Where the tokens and the feature rows of an item are cut for `ranks` ranks that attend together.

        Two tuples of ranks + 1 bounds, (0, ..., tokens) and (0, ..., rows): no row needs tokens of two
        slices, and tokens before the patches belong to the first. None when the item has too few rows, or
        cannot be cut (recordings are dealt by windows instead).
        """
        if self.family != "vit" or self.keep_prefix:
            return None
        rows, columns = shape[0] // self.patch, shape[1] // self.patch
        unit, per_unit = (self.factor * columns, columns // self.factor) if self._blocks else (self.factor, 1)
        units = -(-rows * columns // unit)
        if units < ranks:
            return None
        cuts = even_bounds(units, ranks)
        tokens = tuple(min(rows * columns, cut * unit) + (self.prefix if cut else 0) for cut in cuts)
        return tokens, tuple(cut * per_unit for cut in cuts)

    def slice_pixels(self, shape: Sequence[int], ranks: int, index: int) -> tuple[int, int]:
        """Pixel rows [first, stop) of an image that slice ``index`` of ``ranks`` needs: whole rows of
        patches, of which it may use the first and the last in part."""
        bounds, _ = self.slices(shape, ranks)
        columns = shape[1] // self.patch
        first, stop = (max(0, bound - self.prefix) for bound in bounds[index : index + 2])
        return first // columns * self.patch, -(-stop // columns) * self.patch

    @property
    def _blocks(self) -> bool:
        return self.reduction == "pixel_shuffle"

    @property
    def trainable(self) -> bool:
        return self.tower_trainable or self.projector_trainable

    @property
    def row_width(self) -> int:
        """Numbers of a feature row: the row itself, then its levels."""
        return self.out_hidden * (1 + self.levels)

    @property
    def stem_width(self) -> int:
        """Numbers that backward needs of a token before the first layer."""
        return 2 * self.hidden

    @property
    def projector_in(self) -> int:
        """Channels of a row as the projector's first linear sees it."""
        return (
            self.hidden
            * {"none": 1, "frame_stack": self.factor, "pixel_shuffle": self.factor**2}[self.reduction]
        )

    @property
    def projector_parameters(self) -> int:
        return (self.projector_in + 1) * self.projector_hidden + (self.projector_hidden + 1) * self.out_hidden

    @property
    def projector_flops(self) -> tuple[int, int]:
        """Forward FLOPs of the projector's two linears for a row."""
        hidden = self.projector_hidden
        return 2 * self.projector_in * hidden, 2 * hidden * self.out_hidden

    def projected_rows(self, tokens: int, rows: int) -> int:
        """How many rows the projector makes where ``tokens`` tower tokens give ``rows`` feature rows."""
        return rows

    def measure(self, shape: Sequence[int]) -> tuple[tuple[int, ...], int]:
        """Segment lengths (tokens) and feature rows of an item.

        ``shape``: (height, width) in pixels after preprocessing, (frames, height, width) of a video, (mel
        frames,), or a tower's own for tiles. UserError when it is too small for one token or its grid does
        not divide.
        """
        if self.family == "vit":
            return self._measure_image(*shape)
        return self._measure_audio(*shape)

    def _measure_image(self, height: int, width: int) -> tuple[tuple[int, ...], int]:
        rows, columns = height // self.patch, width // self.patch
        if rows * columns == 0:
            raise UserError(
                f"omni.encoders.{self.name}: an image of {height} x {width} pixels is smaller than one patch "
                f"({self.patch} x {self.patch}); resize it before encoding"
            )
        self._check_grid(rows, columns)
        tokens = rows * columns
        if self.reduction == "pixel_shuffle":
            return (self.prefix + tokens,), tokens // self.factor**2
        features = tokens + (self.prefix if self.keep_prefix else 0)
        return (self.prefix + tokens,), -(-features // self.factor)

    def _measure_audio(self, frames: int) -> tuple[tuple[int, ...], int]:
        if frames < 1:
            raise UserError(f"omni.encoders.{self.name}: a clip without a single mel frame; remove the row")
        full, rest = divmod(frames, self.window)
        segments = (self.positions,) * full
        if rest:
            segments += (self.positions if self.pad_to_window else (rest + 1) // 2,)
        return segments, -(-sum(segments) // self.factor)

    def minimal_shape(self) -> tuple[int, ...]:
        """Shape of the smallest legal item: what a rank without work runs to take part in collectives."""
        if self.family == "vit":
            side = self.patch * (self.factor if self.reduction == "pixel_shuffle" else 1)
            return side, side
        # Not one frame: for that, torch's bf16 convolution on CPU leaves its weight gradient uninitialised.
        return (2,)

    def example_shape(self, scale: float) -> tuple[int, ...]:
        """Shape of a made-up item of ``scale`` times the encoder's native size."""
        if self.family == "vit":
            step = self.minimal_shape()[0]
            largest = isqrt(self.max_pixels) or self.image
            side = max(step, int(largest * scale) // step * step)
            return side, side
        return (max(self.minimal_shape()[0], int(self.window * scale)),)

    def example_video(self, scale: float) -> tuple[int, ...]:
        """Shape of a made-up video of up to 32 frames."""
        return (max(1, int(32 * scale)), *self.example_shape(min(0.5, 2 * scale)))

    def _first_flops(self, segments: Sequence[int]) -> int:
        """The first convolution, whose input needs no gradient."""
        tokens = sum(segments)
        if self.family == "vit":
            patches = tokens - self.prefix * len(segments)
            return 2 * patches * self.channels * self.patch**2 * self.hidden
        return 2 * (2 * tokens) * 3 * self.mels * self.hidden

    def _tower_flops(self, segments: Sequence[int]) -> int:
        tokens = sum(segments)
        per_token = 2 * self.hidden * (4 * self.hidden + self.mlp_matrices * self.intermediate)
        second = 2 * tokens * 3 * self.hidden**2 if self.family == "whisper" else 0
        matrices = self.layers * tokens * per_token
        return self._first_flops(segments) + second + matrices + self._attention_flops(segments)

    def _attention_flops(self, segments: Sequence[int]) -> int:
        """Scores and values of all layers."""
        return self.layers * sum(4 * self.hidden * length * length for length in segments)

    def forward_flops(self, segments: Sequence[int], rows: int) -> int:
        """FLOPs of tower and projector for segments of these lengths (tokens) that give ``rows`` features."""
        rows = self.projected_rows(sum(segments), rows)
        return self._tower_flops(segments) + rows * sum(self.projector_flops)

    def backward_flops(self, segments: Sequence[int], rows: int) -> int:
        """FLOPs of the gradients that are needed: 0 when frozen, the projector's alone under a frozen
        tower."""
        rows = self.projected_rows(sum(segments), rows)
        first, second = (rows * flops for flops in self.projector_flops)
        flops = 0
        if self.tower_trainable:
            flops += 2 * self._tower_flops(segments) - self._first_flops(segments) + first
        if self.trainable:
            flops += second
        if self.projector_trainable:
            flops += first + second
        return flops

    def item_cost(self, item: Item) -> int:
        """Forward and backward FLOPs of an item."""
        return self.forward_flops(item.segments, item.rows) + self.backward_flops(item.segments, item.rows)
