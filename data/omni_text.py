"""Texts for a checkpoint that hears the sound of its videos: whose rows stand among the video's."""

from collections.abc import Mapping, Sequence
from typing import Any

from data.media_words import Word
from data.model_text import ModelTextProcessor
from data.planned import Planned
from data.rows import Sample
from data.sounds import interleaved, sounds_of_videos
from omni_ds.plan.clock import Clock


class OmniTextProcessor(ModelTextProcessor):
    """A `ModelTextProcessor` of samples that may have the sound of videos behind their media
    (`data.sounds.SoundReader`): for such a video a placeholder of each run of rows is written, between the
    tokens around a sound.

    temporal: frames of a video that are a step of its grid.
    """

    def __init__(
        self, tokenizer: Any, placeholders: Mapping[str, Any], clock: Clock, temporal: int, **more: Any
    ):
        self.clock, self.temporal = clock, temporal
        super().__init__(tokenizer, placeholders, **more)

    def _word(self, sample: Sample, planned: Sequence[Planned], ordinal: int) -> Word:
        sound = sounds_of_videos(sample.media).get(ordinal)
        if sound is None:
            return super()._word(sample, planned, ordinal)
        seen, heard = planned[ordinal], planned[sound]
        steps = seen.shape[0] // self.temporal
        runs = interleaved(steps, seen.rows // steps, seen.seconds, heard.rows, self.clock)
        tokens = {False: self._by_modality["video"].token, True: self._by_modality["audio"].token}
        start, end = self.tokenizer.convert_ids_to_tokens([self.clock.start, self.clock.end])
        return Word(
            "".join([start, *(tokens[of_sound] for of_sound, _ in runs), end]),
            tuple((sound if of_sound else ordinal, count) for of_sound, count in runs),
        )
