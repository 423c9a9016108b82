"""A model folder's tokenizer, loaded without torch where that can be done.

`AutoTokenizer` imports every model's classes and torch: 330 MB in each process and some seconds, for classes that a
process which only tokenises never uses.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PLAIN_CLASSES = frozenset({"TokenizersBackend", "PreTrainedTokenizerFast"})
"""Two names of the one class that is `tokenizer.json` and nothing else."""


def load_tokenizer(folder: Path | str) -> Any:
    """The same tokenizer as `AutoTokenizer.from_pretrained(folder)`. Raises what that raises."""
    if _is_plain(Path(folder)):
        from transformers.tokenization_utils_tokenizers import TokenizersBackend

        return TokenizersBackend.from_pretrained(str(folder))
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder))


def _is_plain(folder: Path) -> bool:
    """Whether the folder names no class of its own. What is unreadable is `AutoTokenizer`'s to refuse."""
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text())
    except (OSError, ValueError):
        return False
    is_plain = config.get("tokenizer_class") in PLAIN_CLASSES and "auto_map" not in config
    return is_plain and (folder / "tokenizer.json").is_file()
