"""What old data does to learning: how far each loss gets on episodes of policies that are 0, 1, 2, 4, 8 versions old.

    python benchmarks/staleness.py [--quick] [--json] [--seeds N] [--steps N] [--minibatches N] [--task NAME]
                                   [--losses NAME ...] [--output FOLDER]

The tiny random-weight model learns one of two tasks. `different`: answer with lowercase letters, each at most once (the
reward is the share of different letters), so that a policy which collapses earns next to nothing; what counts is the
reward in the end. `same`: answer with the letter e alone (the reward is its share), so that the policy must become
certain of what it hardly ever did; all get there, and what counts is the mean reward on the way. Every step samples
from the weights of `age` versions ago, records their log-probabilities, and trains the newest weights with the losses
and defaults of the learner, in one optimizer step or several (`--minibatches`, proximal log-probabilities from the
start of the batch); `reinforce` without correction is what happens when nobody corrects. The first beta of AdamW is 0.9
where the name has no other. The newest weights are evaluated on fresh samples. Everything is real but the asynchrony,
which is exact here. At age 0 all losses have the same gradient, so that is run once for each beta. `--losses` runs some
only, and adds them to what the folder has.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

from roll_flash.config.sections.learner import LossConfig
from roll_flash.learner.losses.advantages import grpo
from roll_flash.learner.losses.policy import policy_loss
from roll_flash.learner.model.policy_model import PolicyModel, load_policy_model
from roll_flash.learner.packing.rows import PackedRow, TrainSequence, pack
from roll_flash.models.prepare import resolve_model

AGES = (0, 1, 2, 4, 8)
_LOSSES: dict[str, dict[str, Any]] = {
    "decoupled_ppo": {"name": "decoupled_ppo"},
    "tis": {"name": "tis"},
    "topr": {"name": "topr"},
    "tis_topr": {"name": "tis_topr"},
    "ppo": {"name": "ppo"},
    "uncorrected": {"name": "reinforce", "correction": "none"},
}
MOMENTUM = 0.9
VARIANTS = {name: (loss, MOMENTUM) for name, loss in _LOSSES.items()} | {
    f"{name}, beta {beta:g}": (_LOSSES[name], beta)
    for name, beta in [*((name, 0.0) for name in ("decoupled_ppo", "tis", "topr", "tis_topr")), ("tis_topr", 0.5)]
}
"""Losses, and the first beta of AdamW."""
GROUPS, REPLICAS, NEW_TOKENS = 4, 8, 16
EVALUATION_SAMPLES = 128


@dataclass(frozen=True, slots=True)
class Settings:
    steps: int
    learning_rate: float
    evaluate_every: int
    minibatches: int
    task: str


class Task:
    """Answer a prompt with as many different lowercase letters as there are places, or with e alone."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.sampler: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        letters = [self.tokenizer.convert_tokens_to_ids(chr(code)) for code in range(ord("a"), ord("z") + 1)]
        self._wanted = self.tokenizer.convert_tokens_to_ids("e")
        self._is_letter = np.zeros(self.sampler.config.vocab_size, np.bool_)
        self._is_letter[letters] = True

    def prompt(self, number: int) -> list[int]:
        message = [{"role": "user", "content": f"say letters {number % 1000:03d}"}]
        text = self.tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        return [int(token) for token in self.tokenizer(text, add_special_tokens=False)["input_ids"]]

    def rewards(self, answers: torch.Tensor) -> np.ndarray:
        """Of each answer [samples, tokens] the share of its tokens that count."""
        if self.name == "same":
            return np.asarray((answers.numpy() == self._wanted).mean(1))
        return np.array([len(set(answer[self._is_letter[answer]])) for answer in answers.numpy()]) / NEW_TOKENS

    @torch.inference_mode()
    def sample(
        self, weights: dict[str, torch.Tensor], prompts: Sequence[list[int]], generator: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(tokens, logprobs) [samples, NEW_TOKENS] under `weights`, at temperature 1."""
        self.sampler.load_state_dict(weights)
        inputs, cache = torch.tensor(prompts), None
        tokens, logprobs = [], []
        for _ in range(NEW_TOKENS):
            output = self.sampler(inputs, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            distribution = output.logits[:, -1].log_softmax(-1)
            inputs = torch.multinomial(distribution.exp(), 1, generator=generator)
            tokens.append(inputs)
            logprobs.append(distribution.gather(-1, inputs))
        return torch.cat(tokens, 1), torch.cat(logprobs, 1)


def run(
    task: Task, policy: PolicyModel, loss: LossConfig, beta: float, age: int, seed: int, settings: Settings
) -> list[float]:
    """Rewards of the newest weights on fresh samples, every `evaluate_every` steps, the first before any step."""
    generator, random = torch.Generator().manual_seed(seed), np.random.default_rng(seed)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=settings.learning_rate, betas=(beta, 0.95), weight_decay=0.0)
    past: deque[dict[str, torch.Tensor]] = deque(maxlen=age + 1)
    curve = []
    for step in range(settings.steps + 1):
        past.append({name: tensor.clone() for name, tensor in policy.model.state_dict().items()})
        if step % settings.evaluate_every == 0:
            prompts = [task.prompt(500 + index % 100) for index in range(EVALUATION_SAMPLES)]
            curve.append(float(task.rewards(task.sample(past[-1], prompts, generator)[0]).mean()))
        prompts = [task.prompt(int(number)) for number in random.integers(0, 500, GROUPS) for _ in range(REPLICAS)]
        answers, logprobs = task.sample(past[0], prompts, generator)
        batch = _sequences(prompts, answers, logprobs, task.rewards(answers))
        _update(policy, optimizer, loss, batch, settings.minibatches)
    return curve


def _sequences(
    prompts: Sequence[list[int]], answers: torch.Tensor, logprobs: torch.Tensor, rewards: np.ndarray
) -> list[TrainSequence]:
    advantages = np.concatenate([grpo(group) for group in rewards.reshape(GROUPS, REPLICAS)])
    sequences = []
    for prompt, answer, behavior, advantage in zip(prompts, answers, logprobs, advantages, strict=True):
        tokens = np.concatenate([prompt, answer.numpy()]).astype(np.int32)
        mask = np.arange(len(tokens)) >= len(prompt)
        spread = np.zeros(len(tokens), np.float32)
        spread[mask] = behavior.numpy()
        constant = np.full(len(tokens), advantage, np.float32)
        sequences.append(TrainSequence(tokens, mask, spread, np.zeros(len(tokens), np.int32), constant))
    return sequences


def _update(
    policy: PolicyModel,
    optimizer: torch.optim.Optimizer,
    loss: LossConfig,
    sequences: Sequence[TrainSequence],
    minibatches: int,
) -> None:
    """One optimizer step for each minibatch of whole groups; all see the proximal policy of the batch's start."""
    size = len(sequences) // minibatches
    rows = [_one_row(sequences[start : start + size]) for start in range(0, len(sequences), size)]
    with torch.no_grad():
        proximal = [policy(row)[0] for row in rows] if minibatches > 1 else [None]
    for row, prox_logprobs in zip(rows, proximal, strict=True):
        found, _ = policy(row)
        policy_loss(
            loss.name,
            logprobs=found,
            prox_logprobs=found.detach() if prox_logprobs is None else prox_logprobs,
            behavior_logprobs=torch.tensor(row.behavior_logprobs),
            advantages=torch.tensor(row.advantages),
            mask=torch.ones_like(found, dtype=torch.bool),
            sequence_ids=torch.tensor(row.sequence_ids),
            normalizer=float(size * NEW_TOKENS),
            **loss.parameters(),
        ).loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def _one_row(sequences: Sequence[TrainSequence]) -> PackedRow:
    [row] = pack(sequences, 4096)
    return row


def measure(
    ages: Sequence[int], names: Sequence[str], seeds: int, settings: Settings, report: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """`report` gets the figures so far after each seed."""
    folder = resolve_model("tiny")
    task = Task(settings.task, folder)
    curves: dict[str, dict[str, list[list[float]]]] = {name: {str(age): [] for age in ages} for name in names}
    started = time.monotonic()
    results: dict[str, Any] = {}
    for seed in range(seeds):
        fresh: dict[float, list[float]] = {}
        for name in names:
            loss, beta = VARIANTS[name]
            for age in ages:
                curve = fresh.get(beta) if age == 0 else None
                if curve is None:
                    curve = run(task, load_policy_model(folder), LossConfig(**loss), beta, age, seed, settings)
                if age == 0:
                    fresh[beta] = curve
                curves[name][str(age)].append(curve)
        results = {
            "task": settings.task,
            "steps": settings.steps,
            "evaluate_every": settings.evaluate_every,
            "learning_rate": settings.learning_rate,
            "minibatches": settings.minibatches,
            "seeds": seed + 1,
            "seconds": time.monotonic() - started,
            "cpu_seconds": time.process_time(),
            "curves": curves,
            "scores": {
                name: {age: interval(scores(settings.task, runs)) for age, runs in by_age.items()}
                for name, by_age in curves.items()
            },
        }
        report(results)
    return results


def scores(task: str, runs: Sequence[Sequence[float]]) -> list[float]:
    """Of each run the mean of its last three evaluations, or where the way counts of all."""
    return [float(np.mean(curve[-3:] if task == "different" else curve)) for curve in runs]


def interval(values: Sequence[float]) -> dict[str, float]:
    """Mean and half width of its 95 % interval over seeds (Student's t)."""
    quantile = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365}.get(len(values), 1.96)
    spread = float(np.std(values, ddof=1)) if len(values) > 1 else math.nan
    return {"mean": float(np.mean(values)), "half_width": quantile * spread / math.sqrt(len(values))}


def merged(earlier: dict[str, Any], results: dict[str, Any]) -> dict[str, Any]:
    """Return earlier results with these added, which must have the same settings and seeds."""
    for key in ("task", "steps", "evaluate_every", "learning_rate", "minibatches", "seeds"):
        if earlier[key] != results[key]:
            sys.exit(f"the results in the folder have {key} {earlier[key]}, not {results[key]}")
    sums = {key: earlier[key] + results[key] for key in ("seconds", "cpu_seconds")}
    both = {key: earlier[key] | results[key] for key in ("curves", "scores")}
    return earlier | sums | both


def write(results: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".json").write_text(json.dumps(results) + "\n")
    plot(results, path.with_suffix(".png"))


def plot(results: dict[str, Any], path: Path) -> None:
    """Final reward against age on the left, learning curves at the largest age on the right."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 5), sharey=True)
    names = list(results["scores"])
    for index, name in enumerate(names):
        ages = list(results["scores"][name])
        places = np.arange(len(ages)) + (index - (len(names) - 1) / 2) * 0.05
        means = [results["scores"][name][age]["mean"] for age in ages]
        widths = [_bar(results, name, age) for age in ages]
        style: dict[str, Any] = {"linestyle": "--", "color": "black"} if name == "uncorrected" else {}
        if VARIANTS[name][1] != MOMENTUM:
            style = {"linewidth": 2.5}
        left.errorbar(places, means, yerr=np.transpose(widths), marker="o", capsize=2, label=name, **style)
        curves = np.asarray(results["curves"][name][ages[-1]])
        right.plot(np.arange(curves.shape[1]) * results["evaluate_every"], curves.mean(0), label=name, **style)
    left.set_xticks(range(len(ages)), ages)
    left.set_xlabel("age of the data (versions)")
    left.set_ylabel("reward in the end" if results["task"] == "different" else "mean reward on the way")
    bars = "95 % intervals" if results["seeds"] > 2 else "bars: from seed to seed"
    left.set_title(f"{results['steps']} steps ({results['seeds']} seeds, {bars})")
    right.set_xlabel("step")
    right.set_title(f"learning at age {ages[-1]} (mean of seeds)")
    left.set_ylim(0, 1.02)
    figure.legend(*left.get_legend_handles_labels(), fontsize=8, loc="lower center", ncols=4)
    for axis in (left, right):
        axis.grid(alpha=0.3)
    figure.tight_layout(rect=(0, 0.13, 1, 1))
    figure.savefig(path, dpi=110)


def _bar(results: dict[str, Any], name: str, age: str) -> tuple[float, float]:
    """Below and above the mean: the interval, or the range where two seeds make an interval meaningless."""
    found = results["scores"][name][age]
    if results["seeds"] > 2:
        return found["half_width"], found["half_width"]
    values = scores(results["task"], results["curves"][name][age])
    return found["mean"] - min(values), max(values) - found["mean"]


def table(results: dict[str, Any]) -> Table:
    ages = list(next(iter(results["scores"].values())))
    rows = Table("loss", *(f"age {age}" for age in ages), title=f"task {results['task']}, {results['steps']} steps")
    for name, by_age in results["scores"].items():
        rows.add_row(name, *(f"{by_age[age]['mean']:.3f} ± {by_age[age]['half_width']:.3f}" for age in ages))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two ages, two losses, a few steps: within a minute")
    parser.add_argument("--json", action="store_true", help="one object of named figures on standard output")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--minibatches", type=int, default=1, choices=(1, 2, 4), help="optimizer steps per batch")
    parser.add_argument("--task", choices=("different", "same"), default="different")
    parser.add_argument("--losses", nargs="+", choices=VARIANTS, metavar="NAME", help="only these, added to --output")
    parser.add_argument("--output", type=Path, help="folder for staleness.json and staleness.png")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    settings = Settings(
        10 if options.quick else options.steps, options.learning_rate, 5, options.minibatches, options.task
    )
    ages, names = ((0, 4), ("decoupled_ppo", "tis_topr, beta 0.5")) if options.quick else (AGES, tuple(VARIANTS))
    name = "staleness" if options.task == "different" else f"staleness_{options.task}"
    name += f"_minibatches_{options.minibatches}" if options.minibatches > 1 else ""

    def save(so_far: dict[str, Any]) -> None:
        print(f"{so_far['seeds']} seeds: {so_far['seconds']:.0f} s", file=sys.stderr)
        if options.output is not None and not options.losses:
            write(so_far, options.output / name)

    results = measure(ages, options.losses or names, 2 if options.quick else options.seeds, settings, save)
    if options.losses and options.output is not None:
        results = merged(json.loads((options.output / f"{name}.json").read_text()), results)
        write(results, options.output / name)
    if options.json:
        print(json.dumps(results))
    else:
        Console().print(table(results))


if __name__ == "__main__":
    main()
