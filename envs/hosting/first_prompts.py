"""Renders the prompts of first tasks before anything slow starts: what fails for all of them fails every episode."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from roll_flash.chat.rendered_conversation import open_conversation
from roll_flash.chat.templates import Tools, chat_template_of
from roll_flash.chat.tokenizer import load_checked_tokenizer
from roll_flash.config.tree import DATASET_ENV, Config
from roll_flash.config.user_code import described
from roll_flash.envs.hosting.environments import EnvironmentMaker
from roll_flash.envs.hosting.waiting import call_in_time
from roll_flash.envs.tools.tool_chat import ToolChat, declared_tools
from roll_flash.errors import ConfigError, EnvError, ModelError
from roll_flash.processes.background import DaemonThreads
from roll_flash.terminal import say
from roll_flash.types import Message, Task

TASKS = 8
"""Number of tasks of a level that are tried until one fits: a data set may have some prompts that are too long."""
RESET_S = 20.0
"""Timeout in seconds of making and resetting an environment here. One that takes longer is not checked."""
ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
"""Roles of messages. Chat templates write others into the prompt as they are."""
SHORT_THOUGHT = 512
"""Fewer new tokens cut most answers of a thinking model before they begin."""

Prompt = tuple[Sequence[Message], Tools]


class PromptCheck:
    """Renders prompts with the chat template of a run's model. Raises ModelError if its tokenizer cannot be loaded."""

    def __init__(self, config: Config, folder: Path) -> None:
        self._config = config
        self._tokenizer = load_checked_tokenizer(folder, config.model.chat_template_kwargs)
        self._roles: set[str] = set()
        self._left_out: set[str] = set()

    def tokens(self, task: Task, messages: Sequence[Message], tools: Tools = None) -> int:
        """Return the number of tokens of a task's prompt. Raises ConfigError if the chat template refuses it or it
        leaves no room for an answer."""
        try:
            template = chat_template_of(self._tokenizer)
            chat = ToolChat(tools, template if tools else None)
            opening = chat.opening(messages)
            self._roles.update(message["role"] for message in messages)
            self._left_out.update(template.left_out(list(messages)))
            begun = open_conversation(self._config.model.thinking, self._tokenizer, opening, chat.native)
        except ModelError as error:
            raise ConfigError(f"the prompt of task {task.task_id} cannot be rendered: {error}") from None
        longest = self._config.model.max_length
        if begun.prompt_length >= longest:
            raise ConfigError(
                f"the prompt of task {task.task_id} has {begun.prompt_length:,} tokens and leaves no room for an "
                f"answer in model.max_length={longest:,}; raise that, or shorten the prompt"
            )
        return begun.prompt_length

    def check(self, levels: Sequence[Sequence[Task]]) -> None:
        """Check the first tasks of each level. Raises ConfigError if no prompt of a level can be played. What needs a
        sandbox, has a loop of its own, or fails to reset is left to its episodes."""
        for tasks in levels:
            first_error: ConfigError | None = None
            for task in tasks:
                prompt = _prompt_of(task)
                try:
                    if prompt is not None:
                        self.tokens(task, *prompt)
                    break
                except ConfigError as error:
                    first_error = first_error or error
            else:
                if first_error is not None:
                    raise first_error

    def warnings(self) -> list[str]:
        """Return a line for what is seldom meant, in the config or in a prompt that was checked."""
        found = (self._cut_thoughts(), self._unknown_roles(), self._unseen_messages(), self._endless_turns())
        return [line for line in found if line is not None]

    def _unseen_messages(self) -> str | None:
        if not self._left_out:
            return None
        roles = " and ".join(sorted(self._left_out))
        return f"the chat template leaves out text of {roles} messages, or changes it: the model does not see all of it"

    def _unknown_roles(self) -> str | None:
        unknown = sorted(self._roles - ROLES)
        if not unknown:
            return None
        return (
            f"a prompt has a message with the role {unknown[0]!r}, which the model may never have seen: most know "
            f"{', '.join(sorted(ROLES))}"
        )

    def _endless_turns(self) -> str | None:
        """Return a line if nothing in a conversation shows the model how a turn ends."""
        if self._config.rollout.stop or chat_template_of(self._tokenizer).end_of_turn is not None:
            return None
        return (
            "the chat template shows no special token at the end of a turn of the model, so that it may never write "
            f"one: turns may go on until rollout.max_new_tokens={self._config.rollout.max_new_tokens}; name a text "
            "that ends them in rollout.stop, or use another template"
        )

    def _cut_thoughts(self) -> str | None:
        """Return a line if a thinking model has too few tokens to end its thoughts."""
        most = self._config.rollout.max_new_tokens
        if most >= SHORT_THOUGHT or not chat_template_of(self._tokenizer).expects_thinking:
            return None
        return (
            f"the model thinks before it answers, and rollout.max_new_tokens={most} may end a turn within its "
            "thoughts: raise it, or turn thinking off (model.chat_template_kwargs={enable_thinking: false}, if its "
            "template knows that)"
        )


def _prompt_of(task: Task) -> Prompt | None:
    work = partial(_reset, task, DaemonThreads())  # code of users may hold up its thread for ever
    try:
        return call_in_time(lambda: asyncio.run(work()), f"the first prompt of {task.env_id}", RESET_S)
    except ConfigError:  # slow; its episodes have more time
        return None
    except (Exception, SystemExit) as error:  # no end: episodes count their failures, and one alone may be chance
        say(f"task {task.task_id} cannot begin, and others may not: {described(error)}", error=True)
        return None


async def _reset(task: Task, threads: DaemonThreads) -> Prompt | None:
    env = await EnvironmentMaker(threads).open(task)
    try:
        if env.sandbox_env is not None or env.runs_own_loop:
            return (task.kwargs["messages"], None) if task.env_id == DATASET_ENV else None
        messages, about = await env.reset(task.seed)
        if not messages:
            raise EnvError("reset returned an empty observation; say what the task is")
        return messages, declared_tools(about)[0]
    finally:
        await env.close()
