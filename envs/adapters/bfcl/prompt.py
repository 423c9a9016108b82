"""BFCL's original texts: bfcl-eval's default prompt for models without function calling, and its result format."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from roll_flash.envs.adapters.bfcl.items import import_bfcl
from roll_flash.types import Message


def system_prompt(functions: Sequence[Mapping[str, Any]]) -> str:
    """Same as bfcl-eval's `formulate_system_prompt` in its default format: calls as Python list, functions as JSON."""
    words = _prompts()
    style = words.PROMPT_STYLE_TEMPLATES["classic"]
    return str(
        words.PROMPT_TEMPLATE_MAPPING["plaintext"].format(
            persona=style["persona"],
            task=style["task"],
            tool_call_format=style["tool_call_no_tag"].format(
                output_format=words.OUTPUT_FORMAT_MAPPING["python"], param_types=words.PARAM_TYPE_MAPPING["python"]
            ),
            multiturn_behavior=style["multiturn_behavior"],
            available_tools=style["available_tools"].format(
                format="json", functions=json.dumps(list(functions), indent=4)
            ),
        )
    )


def added_functions(functions: Sequence[Mapping[str, Any]]) -> Message:
    """Return the user message that announces functions held out before."""
    text = _prompts().DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_PROMPTING
    return {"role": "user", "content": text.format(functions=[dict(function) for function in functions])}


def python_results(shown: Sequence[tuple[str, str]]) -> Message:
    """Return calls and their results as one user message."""
    return {"role": "user", "content": repr([{"role": "tool", "name": name, "content": text} for name, text in shown])}


def _prompts() -> Any:
    return import_bfcl("bfcl_eval.constants.default_prompts")
