"""Puts a hint for the teacher into the prompt of a sample; the sampled tokens stay as they are, at other positions."""

from __future__ import annotations

from typing import Any

from roll_flash.chat.templates import chat_template_of
from roll_flash.config.sections.distill import HINT, HintConfig
from roll_flash.errors import RunError
from roll_flash.monitor.episodes import own_answers
from roll_flash.types import Branch, Message, Trajectory


def hinted_tokens(
    sample: Trajectory | Branch, trajectory: Trajectory, config: HintConfig, tokenizer: Any, room: int
) -> tuple[list[int], int]:
    """Return the token ids of a sample of `trajectory` whose prompt has the hint, and by how many its sampled tokens
    are moved. A prompt with far more tokens than `room` is cut.

    Raises RunError without a hint, and unless the prompt without it is, token by token, what the chat template makes of
    the recorded messages: else the teacher would see another conversation.
    """
    template = chat_template_of(tokenizer)
    own = own_answers(sample.messages, len(sample.turns))
    if not 0 < len(sample.turns) == len(own):
        raise RunError("a sample without recorded messages of its turns can have no hint (distill.hint)")
    opening, begin = list(sample.messages[: own[0]]), sample.turns[0].start
    if template.prompt(opening) != sample.token_ids[:begin].tolist():
        raise RunError(
            "the chat template makes another prompt of the recorded messages, which say nothing of tools that it "
            "shows: distill.hint cannot be used here"
        )
    prompt = template.prompt(_with_text(opening, _text(trajectory, config), config), room=room)
    return [*prompt, *sample.token_ids[begin:].tolist()], len(prompt) - begin


def _text(trajectory: Trajectory, config: HintConfig) -> str:
    for source in (trajectory.info, trajectory.task.kwargs):
        if source.get(config.key) is not None:
            return config.text.replace(HINT, str(source[config.key]))
    raise RunError(f"there is no hint {config.key!r} in the info or the task of {trajectory.episode_id} (distill.hint)")


def _with_text(messages: list[Message], text: str, config: HintConfig) -> list[Message]:
    place = next((place for place, message in enumerate(messages) if message["role"] == config.message), None)
    if place is not None:
        added = {**messages[place], "content": f"{messages[place]['content']}\n\n{text}"}
        return [*messages[:place], added, *messages[place + 1 :]]
    if config.message == "user":
        raise RunError("there is no message of the user to add a hint to; set distill.hint.message=system")
    return [{"role": "system", "content": text}, *messages]
