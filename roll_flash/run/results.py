"""A run for a reader: its config, metrics, episodes and models, also while it still trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from roll_flash.checked_files import decode, read_checked
from roll_flash.config.tree import Config, load_config
from roll_flash.errors import RunError
from roll_flash.monitor.episode_files.steps import step_file
from roll_flash.monitor.episodes import read_episodes
from roll_flash.monitor.metrics import read_metrics
from roll_flash.run.run_dir import SUMMARY, Checkpoint, find_run, list_checkpoints


class Run:
    """A run, by its folder or by its name in the folder `runs`. Every call reads the files as they are now.

    Raises ConfigError, with the runs that exist, if there is none.
    """

    def __init__(self, path_or_name: str | Path, *, runs: str | Path = "runs") -> None:
        self.folder = find_run(str(path_or_name), str(runs))

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r})"

    @property
    def config(self) -> Config:
        """The resolved config."""
        return load_config(self.folder / "config.yaml")

    @property
    def checkpoints(self) -> list[Checkpoint]:
        """Complete checkpoints, oldest step first."""
        return list_checkpoints(self.folder)

    @property
    def model(self) -> Path | None:
        """The newest model folder: that of the newest checkpoint; None before the first."""
        folders = [*(checkpoint.hf for checkpoint in reversed(self.checkpoints)), self.folder / "model"]
        return next((folder for folder in folders if (folder / "config.json").is_file()), None)

    def metrics(self) -> list[dict[str, Any]]:
        """Rows of `metrics.jsonl`, oldest first: `step`, `time` (seconds since 1970), and what was measured. A step may
        have several rows; a value that was not finite is None. `pandas.DataFrame` takes them."""
        return read_metrics(self.folder)

    def episodes(self, step: int | None = None) -> list[dict[str, Any]]:
        """Records of all episodes, or of those that ended during one step (0 is the first). Each has every turn, token,
        logprob and weight version. Raises FileNotFoundError for a step without episodes."""
        folder = self.folder / "episodes"
        return read_episodes(folder if step is None else step_file(folder, step))

    def summary(self) -> dict[str, Any]:
        """What `train` has returned. Raises RunError if the run has not ended."""
        path = self.folder / SUMMARY
        if not path.is_file():
            raise RunError(
                f"{self.folder}: the run has not ended, so it has no summary; metrics() has its steps so far"
            )
        summary: dict[str, Any] = decode(read_checked(path), dict[str, Any])
        return summary
