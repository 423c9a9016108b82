"""Loads the tokenizer of a model folder, without torch if possible.

`AutoTokenizer` imports torch and the classes of every model: 330 MB per process and some seconds, for classes that a
process which only tokenises never uses.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from roll_flash.chat.templates import TEMPLATE_KWARGS, UNKNOWN_IDS
from roll_flash.errors import ModelError, first_line
from roll_flash.terminal import say

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
    setattr(tokenizer, UNKNOWN_IDS, _unknown_ids(tokenizer, Path(folder)))
    return tokenizer


def _unknown_ids(tokenizer: Any, folder: Path) -> tuple[int, ...]:
    """Return the ids of added tokens that the model of the folder does not have; none if there is no model."""
    try:
        vocabulary = json.loads((folder / "config.json").read_text()).get("vocab_size")
    except (OSError, ValueError):
        return ()
    if not isinstance(vocabulary, int):
        return ()
    return tuple(number for number in tokenizer.added_tokens_decoder if number >= vocabulary)


def load_checked_tokenizer(folder: Path, chat_template_kwargs: Mapping[str, Any]) -> Any:
    """As `load_tokenizer`, once for checks that follow each other, and says what is waited for. Raises ModelError, in
    one line."""
    if "transformers" not in sys.modules:
        name = (
            f"{folder.parent.name}/{folder.name}" if folder.name == "hf" else folder.name
        )  # "hf": a checkpoint's model
        say(f"loading the tokenizer of {name} (usually 2-10 s)", error=True)
    try:
        states = ((file.name, file.stat()) for file in folder.iterdir())
        files = frozenset((name, state.st_size, state.st_mtime_ns) for name, state in states)
        return _loaded(folder, json.dumps(dict(chat_template_kwargs)), files)
    except Exception as error:  # the libraries raise errors of many kinds, also for damaged files
        what = f"{type(error).__name__}: {first_line(error)}"
        raise ModelError(f"{folder}: its tokenizer cannot be loaded: {what}") from None


@lru_cache(maxsize=1)
def _loaded(folder: Path, chat_template_kwargs: str, files: frozenset[tuple[str, int, int]]) -> Any:
    """`files`: names, sizes and times of what is in the folder, with which the tokenizer changes."""
    return load_tokenizer(folder, json.loads(chat_template_kwargs))


def _is_plain(folder: Path) -> bool:
    """True if the folder needs no custom tokenizer class. False if unreadable: `AutoTokenizer` then raises."""
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text())
    except (OSError, ValueError):
        return False
    is_plain = config.get("tokenizer_class") in PLAIN_CLASSES and "auto_map" not in config
    return is_plain and (folder / "tokenizer.json").is_file()
