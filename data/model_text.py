"""Texts for a multimodal checkpoint: its own template says where media stand and what surrounds them."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from data.errors import RowError
from data.media import MediaRef
from data.media_words import placed
from data.planned import Planned
from data.rows import MEDIA_BASE, MEDIA_CHARACTER, Sample
from data.text import TextProcessor, any_of
from data.tokenised import Tokenised


class ModelTextProcessor(TextProcessor):
    """A `TextProcessor` whose template writes the placeholder tokens itself.

    The template gets a message with media as a list of parts. In what it renders, the n-th placeholder of a
    modality stands for its n-th medium and is put back as that medium's private character; so no text may
    contain a placeholder. written: token that the template writes for a medium instead -> text with a
    placeholder that it becomes; no text may contain such a token either.
    """

    def __init__(self, *arguments: Any, written: Mapping[str, str] | None = None, **keywords: Any):
        self.written = dict(written or {})
        self._marks = any_of(self.written)
        super().__init__(*arguments, **keywords)

    def tokenise(self, sample: Sample, planned: Sequence[Planned] = (), *, verify: bool = True) -> Tokenised:
        texts = [message["content"] or "" for message in sample.messages or ()] + [sample.text or ""]
        for text in texts:
            if found := self._own().search(text) or self._marks.search(text):
                raise RowError("text contains a placeholder token", f"{found[0]!r} stands for media alone")
        if sample.messages is None and sample.media:
            raise RowError("media in plain text", "use messages: the chat template says what surrounds media")
        return super().tokenise(sample, planned, verify=verify)

    def _own(self) -> re.Pattern[str]:
        return any_of(placeholder.token for placeholder in self.placeholders.values())

    def _for_template(self, message: Mapping[str, Any], media: Sequence[MediaRef]) -> dict[str, Any]:
        given = super()._for_template(message, media)
        content = message["content"]
        if content and MEDIA_CHARACTER.search(content):
            pieces = re.split(f"({MEDIA_CHARACTER.pattern})", content)
            given["content"] = [_part(piece, media) for piece in pieces if piece]
        return given

    def _render(self, tools: Sequence[Any] | None, media: Sequence[MediaRef] = ()) -> Any:
        render = super()._render(tools, media)
        characters: dict[str, list[str]] = {p.token: [] for p in self.placeholders.values()}
        for number, ref in placed(media):
            characters[self._by_modality[ref.modality].token].append(chr(MEDIA_BASE + number))

        def rendered(messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> str:
            text = self._marks.sub(
                lambda found: self.written[found[0]], render(messages, add_generation_prompt)
            )
            queues = {token: iter(waiting) for token, waiting in characters.items()}
            return self._own().sub(lambda found: next(queues[found[0]], found[0]), text)

        return rendered


def _part(piece: str, media: Sequence[MediaRef]) -> dict[str, Any]:
    if MEDIA_CHARACTER.fullmatch(piece):
        return {"type": media[ord(piece) - MEDIA_BASE].modality}
    return {"type": "text", "text": piece}
