"""The training part of TRL's GRPO trainer on given groups; benchmarks/learner.py runs it in an environment of its own.

    python learner_trl.py MODEL_FOLDER GROUPS.npz THREADS

For each line on standard input it runs forward and backward of all groups once, one group per pass, and prints seconds
of wall clock and of CPU time. Generation, rewards and the optimizer have no part in it.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer


def open_trainer(folder: str, output: str) -> Any:
    options = GRPOConfig(
        output_dir=output,
        use_cpu=True,
        bf16=False,
        beta=0.0,
        num_generations=2,
        per_device_train_batch_size=2,
        gradient_checkpointing=False,
        report_to=[],
        model_init_kwargs={"dtype": "float32"},
    )
    data = Dataset.from_dict({"prompt": ["a", "b"]})
    trainer = GRPOTrainer(model=folder, reward_funcs=lambda **_: [0.0, 0.0], args=options, train_dataset=data)
    trainer.current_gradient_accumulation_steps = 1  # what `train` would have set
    trainer.model.train()
    return trainer


def read_groups(path: str) -> list[dict[str, torch.Tensor]]:
    """Each group as the trainer's own batch: prompts alike, completions padded on the right."""
    arrays = np.load(path)
    groups = []
    for index in range(int(arrays["groups"])):
        tokens, mask, lengths = (torch.tensor(arrays[f"{name}{index}"]) for name in ("tokens", "mask", "lengths"))
        prompt = int(arrays[f"prompt{index}"])
        places = torch.arange(tokens.shape[1])
        batch = {
            "prompt_ids": tokens[:, :prompt],
            "prompt_mask": torch.ones_like(tokens[:, :prompt]),
            "completion_ids": tokens[:, prompt:],
            "completion_mask": (places < lengths[:, None]).long()[:, prompt:],
            "tool_mask": mask.long()[:, prompt:],
            "advantages": torch.tensor(arrays[f"advantages{index}"]),
            "old_per_token_logps": torch.tensor(arrays[f"behavior{index}"])[:, prompt:],
            "num_items_in_batch": mask.sum(),
        }
        groups.append(batch)
    return groups


def main() -> None:
    folder, path, threads = sys.argv[1:4]
    torch.set_num_threads(int(threads))
    with tempfile.TemporaryDirectory() as output:
        trainer = open_trainer(folder, output)
    groups = read_groups(path)
    print(json.dumps({"ready": True}), flush=True)
    for _ in sys.stdin:
        wall, cpu = time.perf_counter(), time.process_time()
        for batch in groups:
            trainer._compute_loss(trainer.model, batch).backward()
        print(json.dumps({"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}), flush=True)
        trainer.model.zero_grad(set_to_none=False)


if __name__ == "__main__":
    main()
