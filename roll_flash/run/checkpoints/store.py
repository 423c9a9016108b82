"""Copies of a run's checkpoints at a URL: S3, Google Cloud Storage, another file system, whatever fsspec knows.

`URL/step_N/` has the files of `checkpoints/step_N/`, `URL/config.yaml` the config of the run. A copy counts when its
`COMPLETE` is there, which is written last, after all other files were read back and compared with their checksums.
"""

from __future__ import annotations

import asyncio
import posixpath
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import partial
from pathlib import Path

from yaml import YAMLError

from roll_flash.checked_files import load_yaml
from roll_flash.config.tree import CheckpointConfig, Config, load_config
from roll_flash.errors import CheckpointError, ConfigError, first_line
from roll_flash.processes.background import DaemonThreads, call_in_thread
from roll_flash.run.checkpoints.checksums import CHECKSUMS, checksum_of, find_damage, parse_checksums
from roll_flash.run.run_dir import COMPLETE, COPYING, Checkpoint, link_folder, locked_run

CONFIG, PROBE = "config.yaml", ".probe"
FIRST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 300.0
"""Pauses in seconds before a copy is tried again; each is twice as long as the one before."""
CHECK_LIMIT_S = 60.0
"""Seconds in which a store must answer at the start of a run. Drivers by themselves try for many minutes."""
_STEP = re.compile(r"step_(\d+)")


class CheckpointStore:
    """The copies of one run. Its methods block, and raise CheckpointError for whatever the store's driver raises."""

    def __init__(self, url: str) -> None:
        """`url`: the folder of the run. Raises ConfigError for an unknown protocol or a driver that is not there."""
        from fsspec.core import url_to_fs
        from fsspec.registry import known_implementations

        self.url = url.rstrip("/")
        scheme = url.partition("://")[0]
        try:
            self._fs, self._root = url_to_fs(self.url)
        except ImportError as error:
            driver = known_implementations.get(scheme, {}).get("class", scheme).partition(".")[0]
            raise ConfigError(f"{url}: {first_line(error)} (`pip install {driver}`)") from None
        except ValueError as error:
            raise ConfigError(f"{url}: not a URL that fsspec knows: {first_line(error)}") from None

    def check(self) -> None:
        """Write, read and remove a small file. Raises ConfigError: the store is not there, or refuses us."""
        try:
            DaemonThreads().submit(self._probe).result(CHECK_LIMIT_S)
        except TimeoutError:
            raise ConfigError(
                f"{self.url}: no answer within {CHECK_LIMIT_S:g} s; check the address, and that no firewall drops the "
                "packets, or leave out checkpoint.copy_to"
            ) from None
        except CheckpointError as error:
            raise ConfigError(f"{error}; check the address, and the credentials that its driver reads") from None

    def _probe(self) -> None:
        with self._errors("use", ""):
            self._fs.makedirs(self._root, exist_ok=True)
            self._fs.pipe_file(self._at(PROBE), b"probe")
            self._fs.cat_file(self._at(PROBE))
            self._fs.rm_file(self._at(PROBE))

    def steps(self) -> list[int]:
        """Return the steps of complete copies, oldest first."""
        return sorted(step for step in self._folders() if self._exists(f"step_{step}/{COMPLETE}"))

    def require(self, steps: Sequence[int]) -> list[int]:
        """Return these steps, each once. Raises ConfigError if one has no complete copy."""
        have = self.steps()
        if missing := [step for step in steps if step not in have]:
            raise ConfigError(
                f"{self.url}: no complete copy of step {missing[0]}; it has: {', '.join(map(str, have)) or 'none'}"
            )
        return sorted(set(steps))

    def written_at(self, step: int) -> str:
        """Return when a copy was complete, as ISO 8601; empty if the store does not know."""
        with self._errors("read", f"step_{step}"):
            try:
                written: datetime = self._fs.modified(self._at(f"step_{step}/{COMPLETE}"))
            except NotImplementedError:
                return ""
        return written.astimezone().isoformat(timespec="seconds")

    def num_bytes(self, step: int) -> int:
        with self._errors("read", f"step_{step}"):
            return int(self._fs.du(self._at(f"step_{step}")))

    def put(self, folder: Path, step: int, config: Path) -> None:
        """Copy a complete checkpoint and the config of its run, in the place of another copy; compare what arrived.
        What is there already, with the same checksums, is not sent again."""
        name = f"step_{step}"
        if step in self._folders():
            if self._has(step, folder):
                return
            self.remove([step])
        with self._errors("write", name):
            self._fs.makedirs(self._root, exist_ok=True)
            self._fs.put_file(str(config), self._at(CONFIG))
            for file in sorted(path for path in folder.rglob("*") if path.is_file() and path.name != COMPLETE):
                target = self._at(f"{name}/{file.relative_to(folder).as_posix()}")
                self._fs.makedirs(posixpath.dirname(target), exist_ok=True)
                self._fs.put_file(str(file), target)
        if damage := self.find_damage(step):
            raise CheckpointError(f"{self.url}/{name}: read back, {damage}")
        with self._errors("write", name):
            self._fs.pipe_file(self._at(f"{name}/{COMPLETE}"), b"")

    def find_damage(self, step: int) -> str | None:
        """Read a copy and describe the first file that is not as it was written; None if all are."""
        with self._errors("read", f"step_{step}"):
            try:
                expected = parse_checksums(self._fs.cat_file(self._at(f"step_{step}/{CHECKSUMS}")))
                for name, wanted in expected.items():
                    with self._fs.open(self._at(f"step_{step}/{name}"), "rb") as file:
                        size, checksum = checksum_of(file)
                    if size != wanted[0]:
                        return f"{name} has {size} of {wanted[0]} bytes"
                    if checksum != wanted[1]:
                        return f"{name} has other bytes than were written"
            except FileNotFoundError as error:
                return f"{Path(first_line(error)).name} is missing"
            except ValueError:
                return f"{CHECKSUMS} cannot be read"
        return None

    def get(self, step: int, folder: Path) -> None:
        """Copy a checkpoint into a new folder, which has its name when it is complete and as it was written."""
        partial = folder.with_name(f"{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        try:
            with self._errors("read", f"step_{step}"):
                # Only what the checksums name: other names, which a store may hold too, can lead out of the folder.
                names = parse_checksums(self._fs.cat_file(self._at(f"step_{step}/{CHECKSUMS}")))
                for name in (*names, CHECKSUMS, COMPLETE):
                    target = partial / name
                    target.parent.mkdir(parents=True, exist_ok=True)
                    self._fs.get_file(self._at(f"step_{step}/{name}"), str(target))
            if damage := find_damage(partial):
                raise CheckpointError(f"{self.url}/step_{step}: damaged ({damage}); take another step")
            partial.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def config(self) -> tuple[str, Config]:
        """Return the config of the run, as YAML and as it is read. Raises ConfigError for one that no run writes."""
        with self._errors("read", CONFIG):
            content = self._fs.cat_file(self._at(CONFIG))
        try:
            return content.decode(), load_config(dict(load_yaml(content)))
        except (YAMLError, TypeError, ValueError) as error:
            raise ConfigError(f"{self.url}/{CONFIG}: not as a run writes it: {first_line(error)}") from None

    def remove(self, steps: Sequence[int]) -> None:
        """Remove copies; first what makes them complete."""
        for step in steps:
            with self._errors("remove", f"step_{step}"):
                if self._exists(f"step_{step}/{COMPLETE}"):
                    self._fs.rm_file(self._at(f"step_{step}/{COMPLETE}"))
                with suppress(FileNotFoundError):  # some stores list for a while what is gone
                    self._fs.rm(self._at(f"step_{step}"), recursive=True)

    def prune(self, newest: int, keep: int, keep_every: int = 0) -> None:
        """Remove copies as `RunDir.prune_checkpoints` does, and what is left of those that were never complete. Copies
        of steps after `newest`, which the run has not made since it went back, stay and do not count."""
        complete = self.steps()
        old = [step for step in complete if step <= newest][:-keep]
        old = [step for step in old if not keep_every or step % keep_every]
        self.remove([*old, *(step for step in self._folders() if step not in complete)])

    def _folders(self) -> list[int]:
        with self._errors("list", ""):
            self._fs.invalidate_cache()
            try:
                names = self._fs.ls(self._root, detail=False)
            except FileNotFoundError:
                return []
        found = (_STEP.fullmatch(posixpath.basename(name.rstrip("/"))) for name in names)
        return [int(match[1]) for match in found if match]

    def _exists(self, name: str) -> bool:
        with self._errors("read", name):
            return bool(self._fs.exists(self._at(name)))

    def _has(self, step: int, folder: Path) -> bool:
        """True if the copy of a step is complete and has the checksums of this folder."""
        if not self._exists(f"step_{step}/{COMPLETE}"):
            return False
        with self._errors("read", f"step_{step}"), suppress(FileNotFoundError):
            return bool(self._fs.cat_file(self._at(f"step_{step}/{CHECKSUMS}")) == (folder / CHECKSUMS).read_bytes())
        return False

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}"

    @contextmanager
    def _errors(self, what: str, name: str) -> Iterator[None]:
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:  # drivers raise whatever their libraries do
            raise CheckpointError(
                f"{self.url}/{name}: cannot {what} it: {type(error).__name__}: {first_line(error)}".replace("/:", ":")
            ) from None


class CheckpointCopies:
    """Copies complete checkpoints to a store in the background. If several wait, only the newest is copied. A copy that
    fails is said, counted and tried again; it never ends the run, whose own checkpoint is whole."""

    def __init__(self, store: CheckpointStore, config: CheckpointConfig, note: Callable[[str], None]) -> None:
        self._store = store
        self._config = config
        self._note = note
        self._waiting: Checkpoint | None = None
        self._being_copied: Checkpoint | None = None
        self._changed = asyncio.Event()
        self._copying = asyncio.Lock()
        self._copied: int | None = None
        self._failures = 0

    async def add(self, checkpoint: Checkpoint) -> None:
        """Copy this checkpoint. Hard links keep its files until then, also if the run removes it."""
        kept = checkpoint.folder.with_name(f"{checkpoint.folder.name}{COPYING}")
        await asyncio.to_thread(link_folder, checkpoint.folder, kept)
        newest = self._waiting = Checkpoint(checkpoint.step, kept)
        self._changed.set()
        await asyncio.to_thread(self._remove_links, newest)

    async def go_on_from(self, checkpoint: Checkpoint) -> None:
        """Copy the checkpoint with which a run goes on, if it has no copy, and say which copies are of later steps."""
        copied = await call_in_thread(self._store.steps)
        if checkpoint.step not in copied:
            await self.add(checkpoint)
        if later := [step for step in copied if step > checkpoint.step]:
            self._note(
                f"{self._store.url} also has copies of steps {', '.join(map(str, later))}, which the run has not made "
                "since it went back: they stay until it makes these steps again"
            )

    async def run(self) -> None:
        """Copy what waits, for ever."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            pause_s = FIRST_PAUSE_S
            while not await self._copy():
                with suppress(TimeoutError):
                    async with asyncio.timeout(pause_s):
                        await self._changed.wait()
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def settled(self, within_s: float) -> None:
        """Wait until the newest is copied, or could not be once more, or the time is over, which is said."""
        try:
            async with asyncio.timeout(within_s):
                await self._copy()
        except TimeoutError:
            self._failures += 1
            self._note(f"the last checkpoint was not copied within {within_s:g} s (learner.step_timeout_s)")

    def metrics(self) -> dict[str, float]:
        """Step of the newest copy, and failed tries so far."""
        copied = {} if self._copied is None else {"checkpoint/copied_step": float(self._copied)}
        return {**copied, "checkpoint/copy_failures": float(self._failures)}

    async def _copy(self) -> bool:
        """Copy what waits. Return false if that failed."""
        async with self._copying:
            if (checkpoint := self._waiting) is None:
                return True
            self._being_copied = checkpoint
            try:
                await call_in_thread(partial(self._put, checkpoint))
            except CheckpointError as error:
                self._failures += 1
                self._note(f"the checkpoint of step {checkpoint.step} could not be copied: {error}")
                is_copied = False
            else:
                self._copied, is_copied = checkpoint.step, True
                if self._waiting is checkpoint:
                    self._waiting = None
            self._being_copied = None
            await asyncio.to_thread(self._remove_links, checkpoint)
            return is_copied

    def _put(self, checkpoint: Checkpoint) -> None:
        self._store.put(checkpoint.folder, checkpoint.step, checkpoint.folder.parents[1] / CONFIG)
        self._store.prune(checkpoint.step, self._config.keep, self._config.keep_every)

    def _remove_links(self, newest: Checkpoint) -> None:
        """Remove the links to this checkpoint and to older ones, as far as they need not be copied any more: links keep
        the space of checkpoints that the run has removed, and a store may be away for days."""
        needed = [each.step for each in (self._waiting, self._being_copied) if each is not None]
        for path in newest.folder.parent.glob(f"step_*{COPYING}"):
            match = _STEP.fullmatch(path.name.removesuffix(COPYING))
            if match and int(match[1]) <= newest.step and int(match[1]) not in needed:
                shutil.rmtree(path, ignore_errors=True)


def fetch_checkpoint(store: CheckpointStore, step: int | None) -> Checkpoint:
    """Copy a checkpoint, by default the newest, into the folder of its run here, which is made if it is not there.

    Raises ConfigError if there is no such copy, or the run has this checkpoint or is running.
    """
    steps = store.steps() if step is None else store.require([step])
    if not steps:
        raise ConfigError(
            f"{store.url}: no complete copy of a checkpoint; is it checkpoint.copy_to with the run's name?"
        )
    text, config = store.config()
    folder = config.run_folder
    checkpoint = Checkpoint(steps[-1], folder / "checkpoints" / f"step_{steps[-1]}")
    with locked_run(folder):
        if checkpoint.folder.exists():
            raise ConfigError(f"{checkpoint.folder}: exists already; rename it first if you want the copy")
        checkpoint.folder.parent.mkdir(exist_ok=True)
        store.get(checkpoint.step, checkpoint.folder)
        if not (folder / CONFIG).exists():
            (folder / CONFIG).write_text(text)
    return checkpoint


def is_url(text: str) -> bool:
    return "://" in text


def check_store(config: Config, *, resume: bool) -> None:
    """Check that checkpoints can be copied as the config says, and that a new run finds no copies of another one, among
    which its own would be the oldest. Raises ConfigError."""
    if (store := store_of(config)) is None:
        return
    store.check()
    if not resume and (steps := store.steps()):
        raise ConfigError(
            f"{store.url}: has copies of a run of this name (of steps {', '.join(map(str, steps))}); `roll-flash "
            "checkpoints get` brings it back here, and `checkpoints rm` removes them; for another run choose "
            "name=OTHER or another checkpoint.copy_to"
        )


def store_of(config: Config) -> CheckpointStore | None:
    """Return the store of a run's copies, `checkpoint.copy_to`; None if it has none. Raises ConfigError."""
    url = config.checkpoint.copy_to
    return None if url is None else CheckpointStore(f"{url.rstrip('/')}/{config.name}")
