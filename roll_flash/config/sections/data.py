"""Config of a data set: where its rows are, which are held out, how a row becomes a task, what an answer earns."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, FiniteFloat, model_validator

from roll_flash.config.fields import KeywordArguments, LocalPath, PositiveInt, Section

COLUMNS = ("prompt", "messages", "answer", "id")
"""Our names of the columns of Dataset-v0."""
DEMONSTRATION_COLUMNS = ("messages", "prompt", "answer", "tools")


class DataConfig(Section):
    path: LocalPath
    """A `.jsonl`, `.csv`, `.tsv` or `.parquet` file; a folder of such files, or one that the library `datasets` has
    saved; the id of a data set on a hub; a Python iterable of dicts, or a function that returns one: `file.py:NAME`.
    Folders, hubs and `.parquet` need `pip install datasets`."""
    name: Annotated[str, Field(min_length=1)] | None = None
    """Name in the ids of its tasks; None: that of the file, and of its folder if two files have the same."""
    revision: str | None = None
    """Branch, tag or commit of a data set on a hub."""
    subset: str | None = None
    """Configuration of a data set on a hub."""
    split: str = "train"
    """Split to train on, of a hub or of a folder."""
    held_out: LocalPath | None = None
    """Rows for evaluation: another file, or the name of another split. None: a share of the rows."""
    held_out_share: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """Share of the rows that is held out if there is no `held_out`. Equal prompts are on one side."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Names of the columns where they differ from ours, such as `{prompt: question, answer: solution}`. Ours are
    `prompt` (a text) or `messages` (a chat), `answer` and `id`. What is named here must be in every row."""
    environment_column: str | None = None
    """Column with the id of a row's environment, for a mixture in one file. Rows without it are of the entry's `id`."""
    environments: list[str] = Field(default_factory=list)
    """Environments in code of yours that rows may name in `environment_column`, such as `[maze.py:Maze-v0]`. Rows
    name no other code but that of the entry's `id`."""
    kwargs_column: str | None = None
    """Column with the keyword arguments of a row's environment, as a mapping; None: all columns are. A row of
    Dataset-v0 can set `answer_in`, `max_turns`, and `tools` and `reward` (names of those of the entry)."""
    template: str | None = None
    """Text of the prompt with columns in braces, such as `{question} Reply with a number.`; None takes the column
    `prompt` as it is."""
    system: str | None = None
    """System message before each prompt."""
    max_prompt_characters: PositiveInt | None = None
    """Leave out rows with a longer prompt; their number is printed. None: keep all. Rows whose prompt has more tokens
    than `model.max_length` are never trained on."""
    epochs: PositiveInt | None = None
    """Number of times that each row is played; the run ends after that. None: no limit but `steps`."""
    shuffle: bool = True
    """Draw rows in an order that depends on the run's seed, instead of that of the file."""

    @property
    def label(self) -> str:
        """Name in the ids of its tasks."""
        return self.name or Path(self.path).stem

    @model_validator(mode="after")
    def _one_prompt(self) -> DataConfig:
        if self.template is not None and {"prompt", "messages"} & self.columns.keys():
            raise ValueError("columns: a template makes the prompt; name prompt or messages there, or remove it")
        return self


class RewardConfig(Section):
    function: str
    """`exact`, `number`, `math`, `regex`, `json_schema`, `python_tests`, or a function of yours: `file.py:NAME`."""
    name: Annotated[str, Field(pattern=r"^\w[\w.-]*$")] | None = None
    """Name in metrics and transcripts; None: that of the function."""
    weight: FiniteFloat = 1.0
    """Factor of its value; with 0 it is only logged."""
    kwargs: KeywordArguments = Field(default_factory=dict)
    """Keyword arguments of the function."""

    @property
    def label(self) -> str:
        """Name in metrics and transcripts."""
        return self.name or self.function.rpartition(":")[2]


def distinct_names(found: Sequence[DataConfig]) -> list[str]:
    """Return a name for each data set, so that no two tasks have one id. Raises ValueError if two have one name."""
    names: list[str] = []
    for data in found:
        others = [other.label for other in found if other is not data]
        name = data.label
        if name in others and data.name is not None and name in names:
            raise ValueError(f"two data sets are called {name!r}; give one another data.name")
        if name in others and data.name is None:
            path = Path(data.path)
            name = f"{path.parent.name}/{path.stem}" if path.parent.name else path.stem
            same = sum(name == earlier or earlier.startswith(f"{name}-") for earlier in names)
            name = f"{name}-{same + 1}" if name in names else name
        names.append(name)
    return names


def require_known_columns(columns: Mapping[str, str], known: Sequence[str], key: str) -> None:
    """Raises ValueError for a name in `columns`, the value of `key`, that is none of ours."""
    for wrong in (name for name in columns if name not in known):
        near = difflib.get_close_matches(wrong, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
        raise ValueError(f"{key}: there is no {wrong!r}; {hint}")


def _as_data(value: Any) -> Any:
    if value is not None and not isinstance(value, str | Mapping | DataConfig):
        raise ValueError(
            "data is a path, or a mapping with path and other keys; several files are a folder, or several entries of "
            "envs"
        )
    return {"path": value} if isinstance(value, str) else value


def _as_rewards(value: Any) -> Any:
    entries = [value] if isinstance(value, str | Mapping) else value
    if not isinstance(entries, list | tuple):
        return entries
    return [{"function": entry} if isinstance(entry, str) else entry for entry in entries]


def _different_labels(rewards: tuple[RewardConfig, ...]) -> tuple[RewardConfig, ...]:
    labels = [reward.label for reward in rewards]
    for label in labels:
        if labels.count(label) > 1:
            raise ValueError(
                f"two rewards are called {label!r}, so that metrics could not tell them apart; give one a name"
            )
    return rewards


Data = Annotated[DataConfig | None, BeforeValidator(_as_data)]
Rewards = Annotated[tuple[RewardConfig, ...], BeforeValidator(_as_rewards), AfterValidator(_different_labels)]
