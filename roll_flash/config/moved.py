"""Keys that the config no longer has, and keys of other frameworks, with the key to write instead."""

from __future__ import annotations

LIST_OF_ENVIRONMENTS = "envs"

MOVED = {
    "env": LIST_OF_ENVIRONMENTS,
    "env.id": "envs.0.id",
    "env.kwargs": "envs.0.kwargs",
    "env.max_turns": "envs.0.max_turns",
    "env.train_seeds": "envs.0.train_seeds",
    "env.weight": "envs.0.weight",
    "env.levels": "envs.0.levels",
    "extra_envs": LIST_OF_ENVIRONMENTS,
    "async_ratio": "scheduler.async_ratio",
    "async_ratio_bounds": "scheduler.async_ratio_bounds",
    "on_stale": "scheduler.on_stale",
    "rollout.groups_per_step": "scheduler.groups_per_step",
    "rollout.group_size": "scheduler.group_size",
    "rollout.extra_groups": "scheduler.extra_groups",
    "rollout.extra_replicas": "scheduler.extra_replicas",
    "rollout.surplus": "scheduler.surplus",
    "rollout.scheduling": "scheduler.mode",
    "rollout.replicate": "scheduler.replicate",
    "rollout.fair": "scheduler.in_order",
    "rollout.drop_groups_without_signal": "scheduler.drop_groups_without_signal",
    "rollout.on_failure": "scheduler.on_failure",
    "rollout.max_requeues": "scheduler.max_requeues",
    "rollout.max_steps_without_signal": "scheduler.max_steps_without_signal",
    "rollout.max_failures_in_a_row": "scheduler.max_failures_in_a_row",
}
"""Old key: new key. Loading a config with an old key is an error that names the new one."""

REMOVED = {"stream": "the trajectory stream has no settings any more"}
"""Old key or section: why it is not needed."""

SYNONYMS = {
    "adv_estimator": "learner.advantage",
    "batch_size": "scheduler.groups_per_step",
    "beta": "learner.kl.coefficient",
    "clip_grad": "learner.max_grad_norm",
    "clip_ratio_high": "learner.loss.clip_high",
    "clip_ratio_low": "learner.loss.clip_low",
    "cliprange_value": "learner.critic.clip",
    "critic_warmup": "learner.critic.warmup_steps",
    "entropy_coef": "learner.entropy_bonus",
    "entropy_coeff": "learner.entropy_bonus",
    "entropy_target": "learner.adaptive_entropy.target",
    "epsilon": "learner.loss.clip_low",
    "epsilon_high": "learner.loss.clip_high",
    "experiment_name": "name",
    "gamma": "learner.critic.discount",
    "grad_clip": "learner.max_grad_norm",
    "kl_coef": "learner.kl.coefficient",
    "kl_loss_coef": "learner.kl.coefficient",
    "lam": "learner.critic.gae_lambda",
    "lora_alpha": "learner.lora.alpha",
    "lora_r": "learner.lora.rank",
    "lora_rank": "learner.lora.rank",
    "loss_agg_mode": "learner.loss_normalization",
    "loss_type": "learner.loss.name",
    "lr": "learner.learning_rate",
    "m2_threshold": "learner.loss.second_moment",
    "mask_truncated_completions": "learner.overlong.filter",
    "max_completion_length": "rollout.max_new_tokens",
    "max_model_len": "model.max_length",
    "max_response_length": "rollout.max_new_tokens",
    "max_steps": "steps",
    "max_tokens": "rollout.max_new_tokens",
    "model_name": "model.path",
    "model_name_or_path": "model.path",
    "n": "scheduler.group_size",
    "n_samples_per_prompt": "scheduler.group_size",
    "num_generations": "scheduler.group_size",
    "output_dir": "runs",
    "ratio_type": "learner.loss.ratio_level",
    "rollout_batch_size": "scheduler.groups_per_step",
    "rollout_n": "scheduler.group_size",
    "rollouts_per_example": "scheduler.group_size",
    "run_name": "name",
    "save_freq": "checkpoint.every",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "target_modules": "learner.lora.targets",
    "test_freq": "eval.every",
    "vf_coef": "learner.critic.coefficient",
    "total_training_steps": "steps",
    "train_batch_size": "scheduler.groups_per_step",
    "use_kl_in_reward": "learner.kl.in_reward",
}
"""Last part of a key in TRL, verl, OpenRLHF, slime or prime-rl: our key."""


def moved_text(key: str) -> str | None:
    """Return one line that says where the dotted `key` is now, or None if neither it nor its section has moved."""
    if (reason := REMOVED.get(key.partition(".")[0])) is not None:
        return f"{key!r}: {reason}; remove it"
    old, rest = key, ""
    while old not in MOVED:
        old, dot, last = old.rpartition(".")
        if not dot:
            return None
        rest = f".{last}{rest}"
    new = MOVED[old]
    if new == LIST_OF_ENVIRONMENTS:
        return f"{old!r} is now {new!r} (a list)"
    return f"'{old}{rest}' is now '{new}{rest}'"
