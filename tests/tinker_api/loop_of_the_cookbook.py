"""A task that the tiny model can learn, for the reinforcement learning loop of tinker-cookbook: answer with digits."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import chz
from tinker_cookbook import renderers
from tinker_cookbook.recipes.math_rl.arithmetic_env import ArithmeticDataset, ArithmeticDatasetBuilder, ArithmeticEnv
from tinker_cookbook.rl.problem_env import ProblemGroupBuilder
from tinker_cookbook.rl.train import Config
from tinker_cookbook.tokenizer_utils import get_tokenizer


class DigitsEnv(ArithmeticEnv):
    """The cookbook's sums; the reward is the share of digits in the answer, because random weights know no sums."""

    def check_answer(self, sample_str: str) -> float:  # type: ignore[override]
        return sum(letter.isdigit() for letter in sample_str) / max(1, len(sample_str))


class DigitsDataset(ArithmeticDataset):
    def _make_env_group_builder(self, rng):  # type: ignore[no-untyped-def]
        x, y = rng.randint(0, 10), rng.randint(0, 10)
        make = partial(DigitsEnv, x, y, renderer=self.renderer, format_coef=0.0)
        return ProblemGroupBuilder(env_thunk=make, num_envs=self.group_size)


@chz.chz
class DigitsDatasetBuilder(ArithmeticDatasetBuilder):
    async def __call__(self) -> tuple[DigitsDataset, None]:
        renderer = renderers.get_renderer(self.renderer_name, tokenizer=get_tokenizer(self.model_name_for_tokenizer))
        return DigitsDataset(self.batch_size, renderer, self.group_size, self.n_batches), None


def config(folder: Path, model: str, steps: int = 20) -> Config:
    tasks = DigitsDatasetBuilder(
        batch_size=4, model_name_for_tokenizer=model, renderer_name="role_colon", n_batches=steps, group_size=8
    )
    return Config(
        learning_rate=5e-3,
        dataset_builder=tasks,
        model_name=model,
        recipe_name="digits",
        renderer_name="role_colon",
        max_tokens=8,
        lora_rank=8,
        log_path=str(folder),
        eval_every=0,
        save_every=0,
    )
