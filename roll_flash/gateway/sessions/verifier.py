"""Load and call a user's function that scores a finished session: `module:function` or `path/to/file.py:function`.

Its argument is the trajectory (messages, tokens; `task.kwargs` is the session's metadata). It returns a number, or a
number and a dict of info, in which `success` says if the task was solved. It may be a coroutine function.
"""

from __future__ import annotations

import asyncio
import inspect
import reprlib
from collections.abc import Callable, Mapping
from typing import Any

from roll_flash.errors import ConfigError, RollFlashError
from roll_flash.types import Trajectory, as_reward
from roll_flash.user_code import load_object

TIMEOUT_S = 600.0


class VerifierError(RollFlashError):
    """The verifier raised, hung, or returned an invalid reward."""


class Verifier:
    def __init__(self, reference: str) -> None:
        """Raises ConfigError if the function cannot be loaded."""
        self.reference = reference
        self._function = _load(reference)

    async def score(self, episode: Trajectory) -> tuple[float, dict[str, Any]]:
        """Call the verifier. Raises VerifierError."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                if inspect.iscoroutinefunction(self._function):
                    found = await self._function(episode)
                else:
                    found = await asyncio.to_thread(self._function, episode)
        except TimeoutError:
            raise VerifierError(f"{self.reference} took longer than {TIMEOUT_S:g} s") from None
        except (Exception, SystemExit) as error:  # user code may raise anything
            raise VerifierError(f"{self.reference} raised {type(error).__name__}: {error}") from error
        reward, info = found if isinstance(found, tuple) and len(found) == 2 else (found, {})
        if not isinstance(info, Mapping):
            raise VerifierError(f"{self.reference} returned {reprlib.repr(found)}, not a number, or one and a dict")
        try:
            return as_reward(reward, f"what {self.reference} returned"), dict(info)
        except ValueError as error:
            raise VerifierError(str(error)) from None


def _load(reference: str) -> Callable[[Trajectory], Any]:
    try:
        function: Callable[[Trajectory], Any] = load_object(reference)
    except ConfigError as error:
        raise ConfigError(f"--verifier: {error}") from None
    if not callable(function):
        raise ConfigError(f"--verifier: {reference} is no function")
    return function
