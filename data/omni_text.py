"""Texts for a checkpoint that hears the sound of its videos: whose rows stand among the video's."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from data.model_text import ModelTextProcessor
from data.planned import Planned
from data.rows import Sample
from data.sounds import interleaved, videos_of_sounds
from data.tokenised import Tokenised
from omni_ds.plan.clock import Clock


class OmniTextProcessor(ModelTextProcessor):
    """A `ModelTextProcessor` of samples that may have the sound of videos behind their media
    (`data.sounds.SoundReader`): the placeholder of such a video becomes one of each run of rows, between the
    tokens around a sound.

    temporal: frames of a video that are a step of its grid.
    """

    def __init__(
        self, tokenizer: Any, placeholders: Mapping[str, Any], clock: Clock, temporal: int, **more: Any
    ):
        self.clock, self.temporal = clock, temporal
        super().__init__(tokenizer, placeholders, **more)

    def tokenise(self, sample: Sample, planned: Sequence[Planned] = (), *, verify: bool = True) -> Tokenised:
        count, sounds = videos_of_sounds(sample.media)
        placed = replace(sample, media=sample.media[:count])
        made = super().tokenise(placed, planned[:count], verify=verify)
        if not sounds:
            return made
        ids, targets, slots, runs, at = [], [], [], [], 0
        for (ordinal, _), slot in zip(made.runs, made.slots, strict=True):
            ids += [made.ids[at:slot]]
            targets += [made.targets[at:slot]]
            inside = [(made.ids[slot], (ordinal, None))]
            if ordinal in sounds:
                inside = self._video(ordinal, sounds[ordinal], planned)
            first = sum(map(len, ids))
            slots += [first + n for n, (_, run) in enumerate(inside) if run is not None]
            runs += [run for _, run in inside if run is not None]
            ids.append(np.array([token for token, _ in inside], dtype=np.int64))
            targets.append(np.zeros(len(inside), dtype=bool))
            at = slot + 1
        ids, targets = np.concatenate([*ids, made.ids[at:]]), np.concatenate([*targets, made.targets[at:]])
        return Tokenised(ids, targets, tuple(slots), tuple(runs))

    def _video(self, video: int, sound: int, planned: Sequence[Planned]) -> list[tuple[int, Any]]:
        """(token, its run or None) of all that stands for a video with sound."""
        seen, heard = planned[video], planned[sound]
        steps = seen.shape[0] // self.temporal
        runs = interleaved(steps, seen.rows // steps, seen.seconds, heard.rows, self.clock)
        tokens = {False: self._by_modality["video"].id, True: self._by_modality["audio"].id}
        inside = [(tokens[of_sound], (sound if of_sound else video, count)) for of_sound, count in runs]
        return [(self.clock.start, None), *inside, (self.clock.end, None)]
