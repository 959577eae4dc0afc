"""Encoders of a composed model: a tower, a reduction of its rows, and a projector."""

import torch
from torch import nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModel
from transformers.models.whisper.modeling_whisper import WhisperEncoder


class OmniProjector(nn.Module):
    """linear, GELU, linear."""

    def __init__(self, in_features, hidden_size, out_features):
        super().__init__()
        self.linear_1 = nn.Linear(in_features, hidden_size)
        self.linear_2 = nn.Linear(hidden_size, out_features)

    def forward(self, rows):
        return self.linear_2(F.gelu(self.linear_1(rows)))


def pixel_shuffle(hidden, rows, columns, factor):
    """[n, rows * columns, H] -> [n, rows * columns / factor^2, factor^2 * H]: joins factor x factor patches.

    The joined patches come in raster order and so do their channels: (row in the square, column in it,
    channel).
    """
    n, _, width = hidden.shape
    grid = hidden.view(n, rows // factor, factor, columns // factor, factor, width)
    return grid.permute(0, 1, 3, 2, 4, 5).reshape(n, -1, factor * factor * width)


def frame_stack(hidden, factor):
    """[n, T, H] -> [n, ceil(T / factor), factor * H]: joins neighbours; the last ones get zeros."""
    n, length, width = hidden.shape
    hidden = F.pad(hidden, (0, 0, 0, -length % factor))
    return hidden.reshape(n, -1, factor * width)


def naflex_inputs(pixels, grid, patch):
    """Images of one size [n, 3, height, width] -> inputs of `Siglip2VisionModel`: flat patches."""
    n, channels = pixels.shape[:2]
    rows, columns = grid
    squares = pixels[..., : rows * patch, : columns * patch].reshape(n, channels, rows, patch, columns, patch)
    patches = squares.permute(0, 2, 4, 3, 5, 1).reshape(n, rows * columns, patch * patch * channels)
    return {
        "pixel_values": patches,
        "pixel_attention_mask": torch.ones(patches.shape[:2], dtype=torch.int64, device=pixels.device),
        "spatial_shapes": torch.tensor([grid] * n, device=pixels.device),
    }


def resize_positions(table, grids, max_length):
    """Positions [side, side, H] -> [images, max_length, H] for images of one grid: bilinear, antialiased.

    Rows before columns, because torch 2.13 on CPU gets a single column wrong when it resizes both at once.
    """
    rows, columns = grids[0].tolist()
    values = table.permute(2, 0, 1)[None].float()
    for size in ((rows, table.shape[1]), (rows, columns)):
        values = F.interpolate(values, size=size, mode="bilinear", align_corners=False, antialias=True)
    positions = values[0].flatten(1).T.to(table.dtype)
    return positions.expand(len(grids), max_length, -1)


def pad_with_silence(mels, frames):
    """[n, mels, k <= frames] -> [n, mels, frames], filled with what WhisperFeatureExtractor makes of silence.

    It clips log10 energies to 8 below the maximum (and at -10), then maps x to (x + 4) / 4.
    """
    missing = frames - mels.shape[2]
    if not missing:
        return mels
    silence = (mels.amax(dim=(1, 2), keepdim=True) - 2.0).clamp_min(-1.5)
    return torch.cat([mels, silence.expand(-1, mels.shape[1], missing)], dim=2)


class OmniEncoder(nn.Module):
    """A tower with its projector. `spec` is an entry of `OmniComposedConfig.encoders`."""

    def __init__(self, spec, out_features, attn_implementation=None):
        super().__init__()
        self.spec = spec
        config = AutoConfig.for_model(**spec["tower"])
        attention = {"attn_implementation": attn_implementation} if attn_implementation else {}
        if spec["modality"] == "audio":
            self.tower = WhisperEncoder._from_config(config, **attention)
            width = config.d_model
        else:
            self.tower = AutoModel.from_config(config, **attention)
            if config.model_type == "siglip2_vision_model":
                self.tower.embeddings.resize_positional_embeddings = resize_positions
            width = config.hidden_size
        reduction, factor = spec["projector"]["reduction"], spec["projector"]["factor"]
        joined = {"none": 1, "frame_stack": factor, "pixel_shuffle": factor**2}[reduction]
        self.projector = OmniProjector(joined * width, spec["projector"]["hidden_size"], out_features)

    @property
    def prefix(self):
        """Tokens before the patches: class token and registers."""
        model_type = self.spec["tower"]["model_type"]
        if model_type in ("siglip_vision_model", "siglip2_vision_model"):
            return 0
        return 1 + (self.tower.config.num_register_tokens if model_type == "dinov2_with_registers" else 0)

    def reduce(self, hidden, grid=None):
        reduction, factor = self.spec["projector"]["reduction"], self.spec["projector"]["factor"]
        if reduction == "pixel_shuffle":
            hidden = pixel_shuffle(hidden, *grid, factor)
        elif reduction == "frame_stack":
            hidden = frame_stack(hidden, factor)
        return self.projector(hidden)

    def forward(self, values):
        """values: images [3, height, width] or clips [mels, frames]; returns [rows, out_features] for each.

        Values of equal shape are encoded together.
        """
        encode = self.encode_audio if self.spec["modality"] == "audio" else self.encode_images
        shapes = {}
        for index, value in enumerate(values):
            shapes.setdefault(tuple(value.shape), []).append(index)
        results = [None] * len(values)
        for indices in shapes.values():
            batch = torch.stack([values[index] for index in indices])
            for index, rows in zip(
                indices, encode(batch.to(self.projector.linear_1.weight.dtype)), strict=True
            ):
                results[index] = rows
        return results

    def encode_images(self, pixels):
        """[n, 3, height, width] -> [n, rows, out_features], from the last hidden state before any norm."""
        model_type, patch = self.spec["tower"]["model_type"], self.tower.config.patch_size
        grid = pixels.shape[2] // patch, pixels.shape[3] // patch
        if model_type == "siglip2_vision_model":
            inputs = naflex_inputs(pixels, grid, patch)
        else:
            inputs = {"pixel_values": pixels}
            if not model_type.startswith("dinov2"):
                inputs["interpolate_pos_encoding"] = True
        hidden = self.tower(**inputs, output_hidden_states=True).hidden_states[-1]
        if not self.spec.get("keep_prefix"):
            hidden = hidden[:, self.prefix :]
        return self.reduce(hidden, grid)

    def encode_audio(self, mels):
        """[n, mels, frames] -> [n, rows, out_features]; windows are encoded apart, their rows joined."""
        window = 2 * self.tower.config.max_source_positions
        parts = list(mels.split(window, dim=2))
        if self.spec.get("pad_to_window"):
            parts = [pad_with_silence(part, window) for part in parts]
        parts = [self.encode_window(part) for part in parts]
        return self.reduce(torch.cat(parts, dim=1))

    def encode_window(self, mels):
        """Whisper on the frames that are there: `WhisperEncoder.forward` takes full windows only."""
        tower = self.tower
        hidden = F.gelu(tower.conv1(mels))
        hidden = F.gelu(tower.conv2(hidden)).transpose(1, 2)
        hidden = hidden + tower.embed_positions.weight[: hidden.shape[1]]
        for layer in tower.layers:
            hidden = layer(hidden, None)
        return tower.layer_norm(hidden)
