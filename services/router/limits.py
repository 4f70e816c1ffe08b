"""Bounds on what one request may contain, checked before any work is done for it."""

from collections.abc import Sequence, Sized
from dataclasses import dataclass
from typing import Protocol

from epd.errors import InvalidRequestError, UnsupportedFeatureError
from epd.media import Media, media_files
from epd.sampling import Constraint, SamplingParams
from services.router.calls import Conversation, PromptInput, TextPrompt, TokenPrompt, VideoPart
from services.router.workers import ServedModel


class HasParts(Protocol):
    """A message, or one of the wire."""

    @property
    def parts(self) -> Sized:
        """What it consists of."""
        ...


@dataclass(frozen=True)
class RequestLimits:
    """Most images, bytes per image, characters of text, items of lists, stop strings, grammar.

    A video counts as an image; each of its frames may have an image's bytes. As many tokens as
    characters may be sent instead of a text.
    """

    max_images: int
    max_video_frames: int
    takes_videos: bool
    max_image_bytes: int
    max_text_chars: int
    max_list_items: int
    max_stop_strings: int
    max_stop_chars: int
    max_grammar_chars: int

    def images_for(self, model: ServedModel) -> int:
        """Most images in a request to this model."""
        return min(self.max_images, model.max_images) if model.accepts_images else 0

    def check_prompt(self, prompt: PromptInput, model: ServedModel) -> None:
        """Checks sizes.

        Raises:
            UnsupportedFeatureError: images for a model without.
            InvalidRequestError: names the bound and the value.
        """
        match prompt:
            case Conversation():
                if not prompt.messages:
                    raise InvalidRequestError("no message", field="conversation.messages")
                self.check_messages(prompt.messages)
                self._check_images(prompt.images, len(prompt.image_urls), model)
                self._check_videos(prompt.videos)
                self._check_text(prompt.text_chars, "conversation")
            case TextPrompt():
                self._check_text(len(prompt.text), "text_prompt")
            case TokenPrompt():
                if not prompt.token_ids:
                    raise InvalidRequestError("no token", field="token_prompt.token_ids")
                self.check_tokens(len(prompt.token_ids))

    def check_messages(self, messages: Sequence[HasParts]) -> None:
        """Checks how many messages and parts there are, of the wire's messages too.

        Raises:
            InvalidRequestError: too many.
        """
        field = "conversation.messages"
        self.check_items(field, len(messages))
        self.check_items(field, sum(len(message.parts) for message in messages))

    def check_items(self, field: str, count: int) -> None:
        """Checks the length of a list.

        Raises:
            InvalidRequestError: it is too long.
        """
        if count > self.max_list_items:
            raise InvalidRequestError(
                f"{count} items, at most {self.max_list_items} are allowed", field=field
            )

    def check_tokens(self, count: int) -> None:
        """Checks the length of a token prompt; the model's context may well be shorter.

        Raises:
            InvalidRequestError: it is too long.
        """
        if count > self.max_text_chars:
            raise InvalidRequestError(
                f"{count} tokens, at most {self.max_text_chars} are allowed",
                field="token_prompt.token_ids",
            )

    def check_sampling(self, sampling: SamplingParams) -> None:
        """Checks the sizes of what says how tokens are drawn.

        Raises:
            InvalidRequestError: a list or the grammar is too long.
        """
        self.check_items("sampling.stop_token_ids", len(sampling.stop_token_ids))
        self.check_items("sampling.logit_bias", len(sampling.logit_bias))
        self.check_constraint(sampling.constraint)

    def check_constraint(self, constraint: Constraint | None) -> None:
        """Checks the size of a grammar; whether it is one is the workers' to say.

        Raises:
            InvalidRequestError: it is too long.
        """
        if constraint is not None and len(constraint.text) > self.max_grammar_chars:
            raise InvalidRequestError(
                f"{len(constraint.text)} characters of grammar, at most {self.max_grammar_chars} "
                "are allowed",
                field="sampling.constraint",
            )

    def check_stop(self, stop: Sequence[str]) -> None:
        """Checks the stop strings.

        Raises:
            InvalidRequestError: too many, too long or empty.
        """
        if len(stop) > self.max_stop_strings:
            raise InvalidRequestError(
                f"{len(stop)} stop strings, at most {self.max_stop_strings} are allowed",
                field="stop",
            )
        for index, text in enumerate(stop):
            if not 0 < len(text) <= self.max_stop_chars:
                raise InvalidRequestError(
                    f"a stop string has {len(text)} characters, allowed are 1 to "
                    f"{self.max_stop_chars}",
                    field=f"stop[{index}]",
                )

    def _check_images(self, images: list[Media], url_count: int, model: ServedModel) -> None:
        count = len(images) + url_count
        if count and not model.accepts_images:
            raise UnsupportedFeatureError(
                f"model {model.name} takes no images", reason="IMAGES_NOT_SUPPORTED"
            )
        most = self.images_for(model)
        if count > most:
            raise InvalidRequestError(
                f"{count} images, at most {most} are allowed", field="conversation.messages"
            )
        for index, media in enumerate(images):
            for file in media_files(media):
                if not 0 < len(file) <= self.max_image_bytes:
                    raise InvalidRequestError(
                        f"image {index} has {len(file)} bytes, allowed are 1 to "
                        f"{self.max_image_bytes}",
                        field="conversation.messages",
                    )

    def _check_videos(self, videos: list[VideoPart]) -> None:
        for part in videos:
            if not self.takes_videos:
                raise UnsupportedFeatureError(
                    "the model takes no videos: it has no video token",
                    reason="VIDEO_UNSUPPORTED",
                    metadata={"field": part.field},
                )
            part.video.check(part.field, self.max_video_frames)

    def _check_text(self, chars: int, field: str) -> None:
        if chars > self.max_text_chars:
            raise InvalidRequestError(
                f"{chars} characters of text, at most {self.max_text_chars} are allowed",
                field=field,
            )
