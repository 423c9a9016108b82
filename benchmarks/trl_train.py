"""Train with TRL's GRPO trainer; benchmarks/against_trl.py runs it in an environment of its own.

    python trl_train.py MODEL_FOLDER ROWS.jsonl OUTPUT_FOLDER SETTINGS.json

The model goes to OUTPUT_FOLDER/model. Prints the seconds of the training part and the mean reward of each step.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from roll_flash.envs.datasets.answers import find_answer
from roll_flash.envs.datasets.rewards import number

PER_PASS = 16
"""Samples of a forward pass: two steps took 105 s with 16, 109 s with 8 and 121 s with 64."""


def solved(completions: list[list[dict[str, str]]], answer: list[str], **_: Any) -> list[float]:
    """The reward of `Dataset-v0` with `reward: number` and `answer_in: last_number`."""
    said = [find_answer(completion[0]["content"], "last_number") for completion in completions]
    return [number(each, wanted) for each, wanted in zip(said, answer, strict=True)]


def main() -> None:
    model, rows, output, settings = sys.argv[1:5]
    wanted = json.loads(settings)
    read = [json.loads(line) for line in Path(rows).read_text().splitlines()]
    data = Dataset.from_list(
        [{"prompt": [{"role": "user", "content": row["prompt"]}], "answer": str(row["answer"])} for row in read]
    )
    samples = wanted["groups_per_step"] * wanted["group_size"]
    options = GRPOConfig(
        output_dir=output,
        use_cpu=True,
        bf16=False,
        seed=wanted["seed"],
        max_steps=wanted["steps"],
        num_generations=wanted["group_size"],
        per_device_train_batch_size=min(PER_PASS, samples),
        gradient_accumulation_steps=max(1, samples // PER_PASS),
        max_completion_length=wanted["max_new_tokens"],
        temperature=1.0,
        learning_rate=wanted["learning_rate"],
        lr_scheduler_type="constant",
        adam_beta1=wanted["betas"][0],
        adam_beta2=wanted["betas"][1],
        max_grad_norm=wanted["max_grad_norm"],
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        model_init_kwargs={"dtype": "float32"},
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=solved,
        args=options,
        train_dataset=data,
        processing_class=AutoTokenizer.from_pretrained(model, padding_side="left"),
    )
    began = time.monotonic()
    trainer.train()
    seconds = time.monotonic() - began
    trainer.save_model(f"{output}/model")
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    print(json.dumps({"training_s": seconds, "rewards": rewards}), flush=True)


if __name__ == "__main__":
    main()
