"""Loads the tokenizer of a model folder, without torch if possible.

`AutoTokenizer` imports torch and the classes of every model: 330 MB per process and some seconds, for classes that a
process which only tokenises never uses.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PLAIN_CLASSES = frozenset({"TokenizersBackend", "PreTrainedTokenizerFast"})
"""Two names of the class that needs only `tokenizer.json`."""


def load_tokenizer(folder: Path | str) -> Any:
    """Return the same tokenizer as `AutoTokenizer.from_pretrained(folder)`. Raises the same errors."""
    if _is_plain(Path(folder)):
        from transformers.tokenization_utils_tokenizers import TokenizersBackend

        return TokenizersBackend.from_pretrained(str(folder))
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder))


def _is_plain(folder: Path) -> bool:
    """True if the folder needs no custom tokenizer class. False if unreadable: `AutoTokenizer` then raises."""
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text())
    except (OSError, ValueError):
        return False
    is_plain = config.get("tokenizer_class") in PLAIN_CLASSES and "auto_map" not in config
    return is_plain and (folder / "tokenizer.json").is_file()
