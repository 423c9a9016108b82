"""Config of a data set: where its rows are, which are held out, how a row becomes a task, what an answer earns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, FiniteFloat, model_validator

from roll_flash.config.fields import KeywordArguments, LocalPath, PositiveInt, Section


class DataConfig(Section):
    path: LocalPath
    """A `.jsonl`, `.csv` or `.parquet` file, a folder that the library `datasets` has saved, or the id of a data set on
    a hub. All but `.jsonl` and `.csv` need `pip install datasets`."""
    subset: str | None = None
    """Configuration of a data set on a hub."""
    split: str = "train"
    """Split to train on, of a hub or of a saved folder."""
    held_out: LocalPath | None = None
    """Rows for evaluation: another file, or the name of another split. None: a share of the rows."""
    held_out_share: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """Share of the rows that is held out if there is no `held_out`. Equal prompts are on one side."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Names of the columns where they differ from ours, such as `{prompt: question, answer: solution}`. Ours are
    `prompt` (a text) or `messages` (a chat), `answer` and `id`."""
    template: str | None = None
    """Text of the prompt with columns in braces, such as `{question} Reply with a number.`; None takes the column
    `prompt` as it is."""
    system: str | None = None
    """System message before each prompt."""
    max_prompt_characters: PositiveInt | None = None
    """Leave out rows with a longer prompt; their number is printed. None: keep all."""
    epochs: PositiveInt | None = None
    """Number of times that each row is played; the run ends after that. None: no limit but `steps`."""
    shuffle: bool = True
    """Draw rows in an order that depends on the run's seed, instead of that of the file."""

    @model_validator(mode="after")
    def _one_prompt(self) -> DataConfig:
        if self.template is not None and {"prompt", "messages"} & self.columns.keys():
            raise ValueError("columns: a template makes the prompt; name prompt or messages there, or remove it")
        return self


class RewardConfig(Section):
    function: str
    """`exact`, `number`, `math`, `regex`, `json_schema`, `python_tests`, or a function of yours: `file.py:NAME`."""
    weight: FiniteFloat = 1.0
    """Factor of its value; with 0 it is only logged."""
    kwargs: KeywordArguments = Field(default_factory=dict)
    """Keyword arguments of the function."""

    @property
    def name(self) -> str:
        """Name in metrics and transcripts."""
        return self.function.rpartition(":")[2]


def _as_data(value: Any) -> Any:
    return {"path": value} if isinstance(value, str) else value


def _as_rewards(value: Any) -> Any:
    entries = [value] if isinstance(value, str | Mapping) else value
    if not isinstance(entries, list | tuple):
        return entries
    return [{"function": entry} if isinstance(entry, str) else entry for entry in entries]


Data = Annotated[DataConfig | None, BeforeValidator(_as_data)]
Rewards = Annotated[tuple[RewardConfig, ...], BeforeValidator(_as_rewards)]
