# %% [markdown]
# # ROLL Flash from Python
#
# A job of two steps with the tiny test model, on the CPU: train, look at the run, evaluate. It takes a minute or two.
# The cells (`# %%`) run one by one in an editor or in Jupyter, or all together: `python examples/python_api.py`.

# %%
from collections.abc import Mapping
from pathlib import Path

import roll_flash

# %% [markdown]
# An environment is in a file of its own, because workers in other processes import it. This one rewards lowercase
# letters, which even a model with random weights writes now and then.

# %%
source = Path("runs/letters.py").resolve()
source.parent.mkdir(exist_ok=True)
source.write_text('''
import roll_flash


class Letters(roll_flash.Env):
    """Write lowercase letters; the reward is their share in the text."""

    async def reset(self, *, seed=None, options=None):
        return f"say letters {seed}", {}

    async def step(self, action):
        share = sum(letter.islower() for letter in action) / max(1, len(action))
        return "", share, True, False, {"success": share > 0.9}


roll_flash.register_env("Letters-v0", Letters)
''')

# %% [markdown]
# A config is a YAML file or a mapping; `docs/config.md` lists every key. Overrides are written as on the command line.

# %%
config = roll_flash.load_config(
    {
        "name": "python-api",
        "model": {"path": "tiny", "max_length": 256},
        "envs": [{"id": f"{source}:Letters-v0", "max_turns": 1}],
        "scheduler": {"groups_per_step": 2, "group_size": 3},
        "rollout": {"max_concurrent": 8, "max_new_tokens": 12},
        "inference": {"engine": "transformers"},
        "learner": {"learning_rate": 3e-3},
        "eval": {"before_and_after": False, "tasks": 4},
    },
    ["steps=2", "seed=1"],
)

# %% [markdown]
# `train` returns when the run has ended. Ctrl-C (or the stop button) saves a checkpoint first; `resume=True` goes on.


# %%
def on_step(step: int, metrics: Mapping[str, float]) -> None:
    print(f"step {step}: reward {metrics['reward']:.3f}, staleness {metrics['staleness_mean']:.2f}")


summary = roll_flash.train(config, on_step=on_step)
print(f"{summary['steps']} steps, {summary['tokens']} tokens, {summary['books']['trained']} trajectories trained")

# %% [markdown]
# A run can be read at any time, also while it trains in another process.

# %%
run = roll_flash.Run("python-api")
rewards = [(row["step"], row["reward"]) for row in run.metrics() if "reward" in row]
print("rewards by step:", rewards)
print("an answer of the first step:", run.episodes(step=0)[0]["messages"][-1]["content"])
print("checkpoints:", [checkpoint.step for checkpoint in run.checkpoints], "newest model:", run.model)

# %% [markdown]
# The evaluation takes the config of the run, and its newest model, on tasks that were not trained on.

# %%
result = roll_flash.evaluate(model=run.folder, attempts=2)
print(result.table())
