"""Finished turns of running episodes: an episode goes on with them after its worker, or the whole run, was killed.

An environment is deterministic unless it is registered with gymnasium's `nondeterministic=True`: with the same seed it
answers the same actions in the same way. So its recorded actions are played again in a new environment, and the model
is asked only for what comes after them. Each prompt and each answer must have the recorded checksum; at the first other
one the episode begins again.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated
from zlib import crc32

import msgspec
import numpy as np

from roll_flash.chat.prompt_logprobs import MAX_LOGPROB
from roll_flash.checked_files import Count
from roll_flash.engines.inference import Generation
from roll_flash.envs.hosting.environments import Step
from roll_flash.errors import RollFlashError
from roll_flash.monitor.json_lines import encode
from roll_flash.types import EpisodeSpec, FinishReason

_Version = Annotated[int, msgspec.Meta(ge=-1, lt=1 << 31)]


class DivergedError(RollFlashError):
    """An episode that is played again does not answer as it did."""


@dataclass(frozen=True, slots=True)
class SentTurn:
    """A finished turn on its way to the driver, which does not read its `record`. `index`: its number in the
    episode."""

    episode_id: str
    index: int
    record: bytes
    """MessagePack, an array of the fields of `_Record`."""

    @classmethod
    def of(cls, record: bytes) -> SentTurn:
        """Raises ValueError for what no turn wrote."""
        found = _read(record)
        RecordedTurn.of(record)
        return cls(found.episode_id, found.index, record)


@dataclass(frozen=True, slots=True)
class RecordedTurn:
    """What the model wrote in a turn, and checksums of what it was given and of what the environment answered."""

    prompt: int
    generation: Generation
    answer: int

    def sent(self, episode_id: str, index: int) -> SentTurn:
        generation = self.generation
        runs = [(version, len(list(same))) for version, same in itertools.groupby(generation.versions.tolist())]
        record = _Record(
            episode_id,
            index,
            self.prompt,
            self.answer,
            generation.token_ids.astype("<i4").tobytes(),
            generation.logprobs.astype("<f4").tobytes(),
            runs,
            generation.finish_reason,
            generation.server,
            generation.elapsed_s,
        )
        return SentTurn(episode_id, index, msgspec.msgpack.encode(record))

    @classmethod
    def of(cls, record: bytes) -> RecordedTurn:
        """Raises ValueError for what no turn wrote."""
        found = _read(record)
        token_ids, logprobs = np.frombuffer(found.token_ids, "<i4"), np.frombuffer(found.logprobs, "<f4")
        versions, counts = np.asarray(found.versions, np.int32).reshape(-1, 2).T
        if not counts.sum(dtype=np.int64) == len(token_ids) == len(logprobs) > 0:
            raise ValueError("its arrays differ in length, or are empty")
        if token_ids.min() < 0 or not np.isfinite(logprobs).all() or logprobs.max() > MAX_LOGPROB:
            raise ValueError("it has tokens or log-probabilities that no server sends")
        if not math.isfinite(found.elapsed_s):
            raise ValueError("it took a time that is no number")
        generation = Generation(
            token_ids.astype(np.int32),
            logprobs.astype(np.float32),
            np.repeat(versions, counts),
            found.finish_reason,
            found.server,
            found.elapsed_s,
        )
        return cls(found.prompt, generation, found.answer)


class _Record(msgspec.Struct, array_like=True):
    """What is stored of a turn: token ids as int32, log-probabilities as float32, little-endian."""

    episode_id: str
    index: Count
    prompt: Count
    answer: Count
    token_ids: bytes
    logprobs: bytes
    versions: list[tuple[_Version, _Version]]
    """Runs (version, number of tokens)."""
    finish_reason: FinishReason
    server: str
    elapsed_s: float


def _read(record: bytes) -> _Record:
    try:
        return msgspec.msgpack.decode(record, type=_Record)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def checksum_of_prompt(token_ids: Sequence[int]) -> int:
    return crc32(np.asarray(token_ids, np.int32).tobytes())


def checksum_of_answer(step: Step) -> int:
    return crc32(encode({"messages": step.messages, "reward": step.reward, "end": step.terminated}).encode())


class EpisodeTurns:
    """The turns of one episode, in its worker: plays the recorded ones again, and sends those that come after them."""

    def __init__(self, spec: EpisodeSpec, send: Callable[[SentTurn], None]) -> None:
        self._episode_id = spec.episode_id
        self._recorded = decode(spec.played)
        self._send: Callable[[SentTurn], None] | None = send
        self._count = 0
        self._prompt = 0
        self._generation: Generation | None = None
        self.continued = 0
        """Number of turns that were played again."""

    def stop(self) -> None:
        """Neither play again nor send any turn: the environment is not deterministic."""
        self._recorded, self._send = [], None

    def recorded(self, prompt: Sequence[int]) -> Generation | None:
        """Return what the model wrote after this prompt; None if it must be asked. Raises DivergedError."""
        if self._count >= len(self._recorded):
            return None
        turn = self._recorded[self._count]
        if turn.prompt != checksum_of_prompt(prompt):
            raise DivergedError(f"the prompt of turn {self._count} is not as it was")
        return turn.generation

    def sampled(self, prompt: Sequence[int], generation: Generation) -> None:
        """Note what the model wrote, before `answered`."""
        if self._send is not None:
            self._prompt, self._generation = checksum_of_prompt(prompt), generation

    def answered(self, step: Step, *, is_last: bool) -> None:
        """Note the end of a turn. Raises DivergedError if it was recorded with another answer."""
        if self._send is None or self._generation is None:
            return
        turn = RecordedTurn(self._prompt, self._generation, checksum_of_answer(step))
        if self._count < len(self._recorded):
            if self._recorded[self._count].answer != turn.answer:
                raise DivergedError(f"the environment's answer in turn {self._count} is not as it was")
            self.continued += 1
        elif not is_last:
            self._send(turn.sent(self._episode_id, self._count))
        self._count += 1


class TurnBook:
    """The finished turns of running episodes, on the driver: records in the order of their turns, by episode id."""

    def __init__(self) -> None:
        self._records: dict[str, list[bytes]] = {}
        self.on_add: Callable[[SentTurn], None] | None = None
        """Called with each turn that is added."""
        self.moved_episodes = self.moved_turns = 0
        """Number of episodes that went on with another worker after theirs had died, and of their turns."""

    def add(self, turn: SentTurn) -> None:
        """Add the next turn of an episode. The first turn of one that began again replaces all others."""
        records = self._records.get(turn.episode_id, [])
        del records[turn.index :]
        if len(records) == turn.index:
            records.append(turn.record)
            self._records[turn.episode_id] = records
            if self.on_add is not None:
                self.on_add(turn)

    def of(self, episode_id: str) -> tuple[bytes, ...]:
        return tuple(self._records.get(episode_id, ()))

    def forget(self, episode_id: str) -> None:
        self._records.pop(episode_id, None)

    def records(self) -> list[bytes]:
        return [record for records in self._records.values() for record in records]

    def keep_only(self, episode_ids: Iterable[str]) -> None:
        wanted = set(episode_ids)
        self._records = {name: records for name, records in self._records.items() if name in wanted}

    def versions(self) -> dict[str, tuple[int, int]]:
        """Return the versions of the oldest and the newest token of each episode."""
        found = {}
        for name, records in self._records.items():
            versions = [turn.generation.versions for turn in decode(records)]
            found[name] = (min(int(each.min()) for each in versions), max(int(each.max()) for each in versions))
        return found

    def __str__(self) -> str:
        turns = sum(len(records) for records in self._records.values())
        return (
            f"{len(self._records)} episodes go on after their last finished turn ({turns} turns are not asked for "
            "again)"
        )


def decode(records: Iterable[bytes]) -> list[RecordedTurn]:
    return [RecordedTurn.of(record) for record in records]
