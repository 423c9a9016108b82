"""AgentEnv-v0: runs an agent program with its own loop in a sandbox that can reach only the model.

The program is a command. It finds the model in the variables that OpenAI's and Anthropic's clients read, and works in
the sandbox; then the task's check scores the final state. Its end (exit status, timeout, too much output) is counted
in `info` and never changes the reward: a failing agent is the policy's fault, and its final state is scored. Only
failures that are not the policy's fault raise: a sandbox that died, a program that cannot be started or that never
called the model.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from roll_flash.config.fields import require_lists
from roll_flash.config.user_code import load_function
from roll_flash.envs.agents.arguments import by_name, require_contents, require_texts, require_variables
from roll_flash.envs.agents.presets import AGENTS_IMAGE, PRESETS, AgentPreset
from roll_flash.envs.agents.session_access import AgentGateway
from roll_flash.envs.agents.shell_line import filled_line
from roll_flash.envs.agents.verifier import (
    CommandVerifier,
    check_task_environment,
)
from roll_flash.envs.base import Observation, SandboxEnv
from roll_flash.envs.registration import make_env
from roll_flash.envs.tools.tool_env import OUT_OF_MEMORY
from roll_flash.errors import ConfigError, EnvError
from roll_flash.processes.background import call_sync_or_async
from roll_flash.sandboxes import ExecResult, SandboxBusy, SandboxDied, SandboxSpec
from roll_flash.types import Message, as_reward

GATEWAY_PORT = 8011
"""Port of the model in the sandbox, on 127.0.0.1."""
FOLDER = "/tmp/agent"
"""Folder of the agent's own files, apart from its work."""
CHECK_MARGIN_S = 5.0
"""Seconds added to the checks' timeouts for writing their files."""
SET_UP_S = 60.0
"""Seconds that `set_up` may take; what takes longer belongs into the image."""
MAX_OUTPUT_BYTES = 1 << 16
MAX_VARIABLE_BYTES = 120_000
"""Kernels start no program with a variable of 128 KiB."""
SHOWN_OUTPUT = 600
SHOWN_LINES = 3
EXIT_NOT_STARTED = (126, 127)
ENDED_OUT_OF_MEMORY = "out_of_memory"
"""End status of an agent whose sandbox died because the agent filled its memory."""


class AgentEnv(SandboxEnv):
    """Environment defined by a program (`agent`, a preset, or `command`), a task, and a check.

    - `command`: argv, or a line for `/bin/sh -c`. `{instruction}`, `{model}` and `{folder}` in it are filled in; in a
      line each stays one word or a part of one, whether it stands in quotes or not.
      Without `{instruction}` the program reads it from `AGENT_INSTRUCTION`, from the file that
      `AGENT_INSTRUCTION_FILE` names, or from its standard input. `arguments` are appended to an argv.
      `program_files`: files of this machine that are copied into `{folder}` under their names.
    - Task: `task_env` (an environment id, with `task_kwargs`), whose own check then gives the reward; or
      `instruction`, `files` (path and content) and `set_up` (a command). `{seed}` in the instruction is the task's
      seed; commands have it as `$SEED`.
    - Check without a `task_env`: `verifier` (a command, see `CommandVerifier`; `verifier_files` are written only then),
      or `verifier_function` (`package.module:function`, called with the sandbox and the seed).
      `verifier_timeout_s` applies also to `partial_credit`. Their sum must fit into `rollout.step_timeout_s`, or the
      run is refused. A check that never ends gives reward 0, not a failure of the environment.
    - `partial_credit`: a second command like the verifier, for a task that is too hard at first. The reward is
      then `(1 - partial_weight) * check + partial_weight * partial`; only the check decides success. `$AGENT_ANSWERS`
      names a file with the model's answers, as the gateway recorded them: a JSON list of messages, which no agent
      can change. `$AGENT_OUTPUT` names a file with the agent's output; a model can put any text there.
    - `policies`: fixed policies of the config that the program may ask too, each by its name as model and with the key
      in `POLICY_KEY_NAME`.
    - `env`: variables of the program. `time_limit_s`, `memory_mb`, `cpus`, `pids`, `image` or `dockerfile`: its
      sandbox. A preset agent runs in the image of `make agents-image`.
    """

    runs_own_loop = True

    def __init__(
        self,
        agent: str | None = None,
        command: str | Sequence[str] | None = None,
        arguments: Sequence[str] = (),
        program_files: Sequence[str] = (),
        task_env: str | None = None,
        task_kwargs: Mapping[str, Any] | None = None,
        instruction: str | None = None,
        files: Mapping[str, str] | None = None,
        set_up: str | None = None,
        verifier: str | None = None,
        verifier_files: Mapping[str, str] | None = None,
        verifier_function: str | None = None,
        verifier_timeout_s: float = 25.0,
        partial_credit: str | None = None,
        partial_weight: float = 0.1,
        policies: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        time_limit_s: float = 300.0,
        image: str | None = None,
        dockerfile: str | None = None,
        memory_mb: int | None = None,
        cpus: float = 1.0,
        pids: int = 128,
    ) -> None:
        require_lists("AgentEnv", arguments=arguments, program_files=program_files, policies=policies)
        require_texts(instruction=instruction, verifier=verifier, partial_credit=partial_credit)
        require_contents(files=files, verifier_files=verifier_files)
        require_variables(env)
        preset = _preset(agent, command)
        self._command = _with_arguments(command if command is not None else preset.command, arguments)
        self._program_files = _read_programs({**preset.files, **by_name(program_files)})
        self._env = {name: str(value) for name, value in {**preset.env, **(env or {})}.items()}
        self._instruction, self._files, self._set_up = instruction, dict(files or {}), set_up
        self._time_limit_s = time_limit_s
        self._task: SandboxEnv | None = None
        if task_env is not None:
            self._task = check_task_environment(make_env(task_env, **(task_kwargs or {})), task_env)
        self._verifier = CommandVerifier(verifier, verifier_files or {}, verifier_timeout_s) if verifier else None
        self._function = load_function(verifier_function, "verifier_function") if verifier_function else None
        self._partial = CommandVerifier(partial_credit, {}, verifier_timeout_s) if partial_credit else None
        self._partial_weight = partial_weight
        self.policies = tuple(policies)
        self._check_arguments()
        default_image = AGENTS_IMAGE if agent is not None and dockerfile is None else None
        self.sandbox_spec = SandboxSpec(  # type: ignore[misc]
            image=image or default_image,
            dockerfile=dockerfile,
            memory_mb=memory_mb or preset.memory_mb,
            cpus=cpus,
            pids=pids,
        )
        self._seed = 0
        self._output = b""
        self._answers: list[Message] = []
        self._info: dict[str, Any] = {}

    def min_step_timeout_s(self) -> float:
        checks = [check for check in (self._verifier, self._partial) if check is not None]
        return sum(check.timeout_s for check in checks) + (CHECK_MARGIN_S if checks else 0.0)

    def min_episode_timeout_s(self) -> float:
        return self._time_limit_s + self.min_step_timeout_s()

    def _check_arguments(self) -> None:
        tasks = (self._task is not None) + (self._instruction is not None)
        checks = sum(check is not None for check in (self._task, self._verifier, self._function))
        if tasks != 1 or checks != 1:
            raise ConfigError(
                "AgentEnv needs one task, `task_env` or `instruction`, and one check: the `task_env`'s own, `verifier` "
                "or `verifier_function`"
            )
        if self._task is not None and (self._files or self._set_up):
            raise ConfigError("AgentEnv: `files` and `set_up` go with `instruction`; a `task_env` sets itself up")
        if not self._command:
            raise ConfigError("AgentEnv: command is empty")
        if not 0.0 <= self._partial_weight <= 1.0 or self._time_limit_s <= 0:
            raise ConfigError("AgentEnv: partial_weight lies between 0 and 1, time_limit_s is positive")
        if any(check is not None and not check.timeout_s > 0 for check in (self._verifier, self._partial)):
            raise ConfigError("AgentEnv: verifier_timeout_s is positive")

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        self._seed = random.randrange(1 << 30) if seed is None else seed
        self._output, self._answers, self._info = b"", [], {}
        if self._task is None:
            return self._own_instruction, {}
        return await self._task.reset(seed=self._seed)

    async def play(self, gateway: AgentGateway) -> None:
        """Run the program until it ends or reaches its time limit. Raises EnvError if it never called the model."""
        instruction = await self._set_task_up()
        began = time.monotonic()
        for path, content in self._program_files.items():
            await self.sandbox.write(path, content)
        await self.sandbox.write(f"{FOLDER}/instruction", instruction)
        async with self.sandbox.forward(GATEWAY_PORT, gateway.port) as forward:
            try:
                result = await self._run(instruction, gateway)
                with suppress(SandboxBusy):  # they are ending; if they still are at the check, the reward is 0
                    await self.sandbox.kill_all()  # processes that it left running must not affect the check
            except SandboxDied as error:
                if error.reason != OUT_OF_MEMORY or forward.accepted == 0:
                    raise
                self._info = {"agent_ended": ENDED_OUT_OF_MEMORY, "agent_s": time.monotonic() - began}
                return
            self._note_end(result)
        self._answers = gateway.answers()
        if forward.accepted == 0:
            raise EnvError(self._why_no_call(result))

    async def _run(self, instruction: str, gateway: AgentGateway) -> ExecResult:
        return await self.sandbox.exec(
            self._filled_command(instruction, gateway.model),
            timeout=self._time_limit_s,
            stdin=None if self._takes_instruction else instruction,
            env={**self._variables(gateway, instruction), **self._env},
            max_output=MAX_OUTPUT_BYTES,
            merge_stderr=True,
        )

    async def score(self) -> tuple[float, dict[str, Any]]:
        """Return the reward of the agent's final state and info on its end. The agent may leave so little memory that
        the sandbox dies during the check, or processes that do not end; the reward is then 0."""
        try:
            if self._info.get("agent_ended") != ENDED_OUT_OF_MEMORY:
                return await self._score()
        except SandboxBusy as error:
            return 0.0, {**self._info, "verifier_error": str(error), "success": False}
        except SandboxDied as error:
            if error.reason != OUT_OF_MEMORY:
                raise
        return 0.0, {**self._info, "agent_ended": ENDED_OUT_OF_MEMORY, "success": False}

    async def _score(self) -> tuple[float, dict[str, Any]]:
        reward, info = await self._check()
        info = {**info, **self._info, "success": info.get("success", reward >= 1.0 - 1e-9)}
        if self._partial is not None:
            named = {"AGENT_OUTPUT": f"{FOLDER}/output", "AGENT_ANSWERS": f"{FOLDER}/answers.json"}
            contents = (self._output, json.dumps(self._answers).encode())
            files = dict(zip(named.values(), contents, strict=True))
            partial, _ = await self._partial(self.sandbox, {**self._check_variables, **named}, files)
            info |= {"check": reward, "partial": partial}
            reward = (1 - self._partial_weight) * reward + self._partial_weight * partial
        return reward, info

    async def conclude(self) -> tuple[float, dict[str, Any]]:
        return await self.score()

    @property
    def _own_instruction(self) -> str:
        assert self._instruction is not None, "checked by the constructor"
        return self._instruction.replace("{seed}", str(self._seed))

    @property
    def _check_variables(self) -> dict[str, str]:
        """Those of each check. None of them names a file that is written for the partial credit only: before it, the
        agent may have put its own there."""
        return {"SEED": str(self._seed)}

    async def _set_task_up(self) -> str:
        if self._task is not None:
            self._task.sandbox = self.sandbox
            return await self._task.agent_task()
        for path, content in self._files.items():
            await self.sandbox.write(path, content)
        if self._set_up is not None:
            result = await self.sandbox.exec(
                self._set_up, timeout=SET_UP_S, env=self._check_variables, merge_stderr=True
            )
            if not result.ok:
                ended = f"ended with exit status {result.exit_code}"
                how = f"took longer than {SET_UP_S:g} s" if result.timed_out else ended
                raise EnvError(f"set_up {how}: {_tail(result.stdout) or 'it printed nothing'}")
        return self._own_instruction

    async def _check(self) -> tuple[float, dict[str, Any]]:
        if self._task is not None:
            return await self._task.conclude()
        if self._function is not None:
            found = await call_sync_or_async(self._function, self.sandbox, self._seed)
            try:
                return as_reward(found, "what verifier_function returned"), {}
            except ValueError as error:
                raise EnvError(str(error)) from None
        assert self._verifier is not None, "checked by the constructor"
        return await self._verifier(self.sandbox, self._check_variables)

    @property
    def _takes_instruction(self) -> bool:
        return "{instruction}" in (self._command if isinstance(self._command, str) else " ".join(self._command))

    def _filled_command(self, instruction: str, model: str) -> str | list[str]:
        if isinstance(self._command, str):  # never inserted into a shell line, which would allow injection
            variables = {"{instruction}": "AGENT_INSTRUCTION", "{model}": "OPENAI_MODEL"}
            return filled_line(self._command.replace("{folder}", FOLDER), variables)
        return [_filled(word, instruction, model) for word in self._command]

    def _variables(self, gateway: AgentGateway, instruction: str) -> dict[str, str]:
        host = f"http://127.0.0.1:{GATEWAY_PORT}"
        fits = self._takes_instruction or len(instruction.encode()) <= MAX_VARIABLE_BYTES
        return {
            **({"AGENT_INSTRUCTION": instruction} if fits else {}),
            "OPENAI_BASE_URL": f"{host}/v1",
            "OPENAI_API_BASE": f"{host}/v1",
            "OPENAI_API_KEY": gateway.api_key,
            **{f"POLICY_KEY_{name.upper()}": gateway.policy_keys[name] for name in self.policies},
            "OPENAI_MODEL": gateway.model,
            "ANTHROPIC_BASE_URL": host,
            "ANTHROPIC_API_KEY": gateway.api_key,
            "ANTHROPIC_MODEL": gateway.model,
            "AGENT_INSTRUCTION_FILE": f"{FOLDER}/instruction",
            "SEED": str(self._seed),
        }

    def _note_end(self, result: ExecResult) -> None:
        self._output = result.stdout
        ended = "time_limit" if result.timed_out else "crashed" if result.exit_code else "finished"
        self._info = {
            "agent_ended": ended,
            "agent_exit": result.exit_code,
            "agent_s": result.duration_s,
            "agent_cpu_s": result.cpu_s,
            "agent_output_bytes": result.stdout_bytes,
            "agent_output_truncated": result.truncated,
            "agent_output_tail": _tail(result.stdout),
        }

    def _why_no_call(self, result: ExecResult) -> str:
        said = " | ".join(_tail(result.stdout + result.stderr).splitlines()[-SHOWN_LINES:])
        if result.exit_code in EXIT_NOT_STARTED:
            return f"the agent program cannot be started (exit status {result.exit_code}): {said}"
        how = f"ran {self._time_limit_s:g} s" if result.timed_out else f"ended with exit status {result.exit_code}"
        return f"the agent made no call of the model: it {how} and said: {said or 'nothing'}"


def _filled(word: str, instruction: str, model: str) -> str:
    return word.replace("{folder}", FOLDER).replace("{model}", model).replace("{instruction}", instruction)


def _preset(agent: str | None, command: str | Sequence[str] | None) -> AgentPreset:
    if agent is None and command is not None:
        return AgentPreset(())
    if agent not in PRESETS:
        raise ConfigError(f"AgentEnv: agent={agent!r}; give a `command`, or one of {', '.join(PRESETS)}")
    return PRESETS[agent]


def _with_arguments(command: str | Sequence[str], arguments: Sequence[str]) -> str | list[str]:
    if isinstance(command, str):
        if arguments:
            raise ConfigError("AgentEnv: `arguments` are appended to a command that is a list, not to a shell line")
        return command
    return [*map(str, command), *map(str, arguments)]


def _read_programs(files: Mapping[str, Path]) -> dict[str, bytes]:
    """Return sandbox paths and contents of the program files. Raises ConfigError."""
    try:
        return {f"{FOLDER}/{name}": path.read_bytes() for name, path in files.items()}
    except OSError as error:
        raise ConfigError(f"AgentEnv: program_files: {error}") from None


def _tail(output: bytes) -> str:
    return output.decode(errors="replace").strip()[-SHOWN_OUTPUT:]
