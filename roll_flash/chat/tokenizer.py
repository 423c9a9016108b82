"""Loads the tokenizer of a model folder, without torch if possible.

`AutoTokenizer` imports torch and the classes of every model: 330 MB per process and some seconds, for classes that a
process which only tokenises never uses.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from roll_flash.chat.templates import TEMPLATE_KWARGS

PLAIN_CLASSES = frozenset({"TokenizersBackend", "PreTrainedTokenizerFast"})
"""Two names of the class that needs only `tokenizer.json`."""


def load_tokenizer(folder: Path | str, chat_template_kwargs: Mapping[str, Any] | None = None) -> Any:
    """Return the same tokenizer as `AutoTokenizer.from_pretrained(folder)`. Raises the same errors.

    `chat_template_kwargs`: arguments for each use of its chat template by `roll_flash.chat.templates`."""
    if _is_plain(Path(folder)):
        from transformers.tokenization_utils_tokenizers import TokenizersBackend

        tokenizer: Any = TokenizersBackend.from_pretrained(str(folder))
    else:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(str(folder))
    setattr(tokenizer, TEMPLATE_KWARGS, dict(chat_template_kwargs or {}))
    return tokenizer


def _is_plain(folder: Path) -> bool:
    """True if the folder needs no custom tokenizer class. False if unreadable: `AutoTokenizer` then raises."""
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text())
    except (OSError, ValueError):
        return False
    is_plain = config.get("tokenizer_class") in PLAIN_CLASSES and "auto_map" not in config
    return is_plain and (folder / "tokenizer.json").is_file()
