"""Refuses a teacher whose tokenizer is not that of the policy: its log-probabilities would be those of other texts.

Vocabulary and the tokens of some texts must be equal. A teacher may have more rows in its embedding than tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from roll_flash.chat.openai_client import OpenAIChatClient, api_key_from
from roll_flash.chat.tokenizer import load_tokenizer
from roll_flash.config.sections.distill import TeacherConfig
from roll_flash.errors import ConfigError, InferenceError

TEXTS = (
    "The quick brown fox jumps over the lazy dog. It's 12:30, isn't it? 3.14159 + 2,000,000 = 42 (or not).",
    "def f(x):\n\treturn {'a': [x ** 2, 0xFF], \"b\": None}  # 4 spaces:    \r\n\n\n<sh>echo $((1+2))</sh>",
    "Größe, naïve, Ελληνικά, русский, 日本語の文章, 한국어, العربية, हिन्दी, 👩‍👩‍👧 🚀, e\u0301\u00a0\u200b ﬁ ½ …",
    "<|im_start|>user\nHello<|im_end|>\n<think>\n</think><s></s><|endoftext|><|eot_id|>[INST] [/INST]",
)
"""English, numbers, code, white space, other scripts, characters that are normalised, and texts of special tokens."""
TOKENS_AT_ONCE = 4096
TIMEOUT_S = 60.0
"""Longest wait in seconds for one answer of an endpoint."""


def check_same_tokenizer(policy: Path, teacher: Path) -> None:
    """Compare the tokenizers of two folders. Raises ConfigError that names the first difference."""
    ours, theirs = load_tokenizer(policy), load_tokenizer(teacher)
    _require_same(f"the vocabulary of {teacher} has other tokens", _words(theirs), _words(ours))
    for text in TEXTS:
        _require_same(f"{teacher} makes other tokens of {text[:40]!r}", _encoded(theirs, text), _encoded(ours, text))


async def check_endpoint(config: TeacherConfig, tokenizer: Any) -> int | None:
    """Compare the tokenizer of a vLLM server with that of the policy, by its routes /tokenize and /detokenize. Return
    its longest context; None if it does not say. Raises ConfigError that names the first difference, InferenceError if
    it does not answer."""
    longest: Any = None
    for text in TEXTS:
        answer = await _ask(config, "/tokenize", {"prompt": text, "add_special_tokens": False})
        longest = answer.get("max_model_len")
        what = f"{config.base_url} makes other tokens of {text[:40]!r}"
        _require_same(what, answer.get("tokens"), _encoded(tokenizer, text))
    ids = [number for number, _ in _words(tokenizer)]
    for begin in range(0, len(ids), TOKENS_AT_ONCE):
        block = ids[begin : begin + TOKENS_AT_ONCE]
        answer = await _ask(config, "/detokenize", {"tokens": block})
        what = f"the vocabulary of {config.base_url} has other tokens from {block[0]} to {block[-1]}"
        _require_same(what, answer.get("prompt"), tokenizer.decode(block))
    return longest if isinstance(longest, int) and longest > 0 else None


async def _ask(config: TeacherConfig, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Ask a route beside `/v1`. Raises InferenceError."""
    root = (config.base_url or "").rstrip("/").removesuffix("/v1")
    client = OpenAIChatClient(root, config.served_name or "", api_key_from(config.api_key_env), path=path)
    try:
        answer = await client.complete({**body, "model": config.served_name}, timeout_s=TIMEOUT_S)
        if not isinstance(answer, dict):
            raise InferenceError(f"{client.url} answers with something else than an object")
        return answer
    except (TimeoutError, InferenceError) as error:
        why = str(error) or f"{client.url}: no answer within {TIMEOUT_S:g} s"
        raise InferenceError(
            f"distill.teacher: its tokenizer cannot be compared: {why}; a teacher at a base_url must be a vLLM server, "
            "whose routes /tokenize and /detokenize are asked"
        ) from None
    finally:
        await client.close()


def _words(tokenizer: Any) -> list[tuple[int, str]]:
    return sorted((number, word) for word, number in tokenizer.get_vocab().items())


def _encoded(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


def _require_same(what: str, theirs: Any, ours: Sequence[Any]) -> None:
    if theirs == ours:
        return
    found = theirs if isinstance(theirs, type(ours)) else ours[:0]
    place = next((place for place, (a, b) in enumerate(zip(found, ours, strict=False)) if a != b), len(found))
    there, here = (repr(each[place : place + 3])[:100] for each in (found, ours))
    raise ConfigError(
        f"distill.teacher: {what} than the model of this run, {there} instead of {here}; distillation compares token "
        "by token, so choose a teacher of the same family"
    )
