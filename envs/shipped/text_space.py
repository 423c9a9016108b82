"""The space of texts and chat messages."""

from __future__ import annotations

import string
from typing import Any

import gymnasium

LONGEST_SAMPLE = 200


class TextSpace(gymnasium.Space[Any]):
    """Any `str`, of any length and in any script, and any list of chat messages.

    `gymnasium.spaces.Text` holds only the characters that it is given, by default letters and digits.
    """

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        """Up to LONGEST_SAMPLE printable characters."""
        length = int(self.np_random.integers(LONGEST_SAMPLE + 1))
        return "".join(self.np_random.choice(list(string.printable), size=length))

    def contains(self, x: Any) -> bool:
        if isinstance(x, str):
            return True
        return isinstance(x, list) and all(isinstance(message, dict) and "role" in message for message in x)

    @property
    def is_np_flattenable(self) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TextSpace)

    def __hash__(self) -> int:
        return hash(TextSpace)

    def __repr__(self) -> str:
        return "TextSpace()"
