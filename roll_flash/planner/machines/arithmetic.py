"""Speeds by arithmetic, where no run was measured: from the shape of a model and the published figures of a GPU.

A decoding step reads the weights and the keys and values of its sequences from memory; reading a prompt and training
are matrix products: 2 operations per parameter and token forward, 4 backward (2 if the weights are frozen). The shares
of the published figures that are reached, and what episodes are like, are assumptions in the hardware file.
"""

from __future__ import annotations

import random
from dataclasses import replace

from roll_flash.config.tree import Config
from roll_flash.errors import ConfigError
from roll_flash.models.shape import ModelShape
from roll_flash.planner.machines.communication import GATHERS_PER_ROW, all_reduce_s, gather_s, ranks_of_copy
from roll_flash.planner.machines.hardware import Hardware
from roll_flash.planner.machines.memory import (
    HALF,
    MOMENTS,
    cache_bytes,
    cache_bytes_per_token,
    master_bytes,
    trained_models,
    trained_parameters,
)
from roll_flash.planner.machines.publication import weight_times
from roll_flash.planner.measured.calibration import Calibration, Speeds
from roll_flash.planner.measured.episodes import MeasuredLoad, duration_s
from roll_flash.planner.measured.group_effects import GroupEffects
from roll_flash.planner.simulation.load import EpisodePlan, LogNormal

ERROR = 0.5
"""Relative error of speeds that nobody measured."""
ITERATION_S = 2e-3
"""Work of a server's processor for each decoding step."""
LAYER_SYNC_S = 2e-5
"""Two exchanges between the GPUs of a server in each layer."""
REQUEST_S = 0.01
CALL_S = 0.05
REPORT_S = 0.2
DRAWN_EPISODES = 512


def arithmetic(config: Config, shape: ModelShape, hardware: Hardware, measured: Calibration | None) -> Calibration:
    """Return speeds for the GPUs of `hardware`; episodes, sandboxes and stages of `measured`, or assumed ones."""
    load = measured.load if measured else _assumed_load(config, hardware)
    speeds = _speeds(config, shape, hardware, _mean_context(load))
    ordered = sorted(load.episodes, key=lambda plan: duration_s(plan, speeds.token_s))
    what = "its figures are published ones and its speeds arithmetic, not measurements"
    episodes = f"episodes {measured.source}" if measured else "episodes are assumed"
    return Calibration(
        source=f"{hardware.gpu.name}: {what}; {episodes}",
        speeds=speeds,
        load=replace(load, episodes=tuple(ordered)),
        sandboxes=measured.sandboxes if measured else None,
        scoring=measured.scoring if measured else (),
        error=ERROR,
        notes=measured.notes if measured else (),
    )


def _speeds(config: Config, shape: ModelShape, hardware: Hardware, context: float) -> Speeds:
    inference, learner, gpu = config.inference, config.learner, hardware.gpu
    split = inference.tensor_parallel_size
    bytes_per_s = 1e9 * hardware.bandwidth_share * gpu.hbm_gb_s
    flops = 1e12 * hardware.matmul_share * gpu.bf16_tflops
    batch = max(2.0, min(inference.max_num_seqs, config.rollout.max_concurrent / inference.servers))
    weights_s, many_s = (HALF * _read_parameters(shape, b) / split / bytes_per_s for b in (1.0, batch))
    per_sequence_s = cache_bytes_per_token(config, shape) * context / bytes_per_s + 2 * shape.computed / flops / split
    growth_s = (many_s - weights_s) / (batch - 1)
    sync_s = LAYER_SYNC_S * shape.layers if split > 1 else 0.0
    shares_gpu = hardware.gpus == 1
    room = cache_bytes(config, shape, hardware.gpu_bytes, shares_gpu=shares_gpu)
    weights = weight_times(config, shape, hardware)
    gathered_s = gather_s(config, shape, hardware) / learner.micro_batch_tokens
    forward_s = _forward_flops(shape, context) / flops
    train_s = max(trained_models(learner) * _train_flops(config, shape, context) / flops, gathered_s)
    # The reference reads each row once more: in the gradient's pass, or, for rewards, before advantages are computed.
    gathered_once_s = gathered_s / GATHERS_PER_ROW
    proximal_s = max(trained_models(learner) * forward_s, gathered_once_s)
    reference_s = max(forward_s, gathered_once_s) if learner.kl.coefficient else 0.0
    before = learner.kl.in_reward and learner.keeps_groups
    states = (master_bytes(learner) + MOMENTS) * trained_parameters(learner, shape) // ranks_of_copy(config)
    return Speeds(
        request_s=REQUEST_S,
        token_s=ITERATION_S + weights_s - growth_s + sync_s,
        sequence_s=per_sequence_s + growth_s,
        prompt_token_s=2 * shape.computed / flops / split,
        call_s=CALL_S,
        train_token_s=train_s if before else train_s + reference_s,
        proximal_token_s=proximal_s + reference_s if before else proximal_s,
        update_s=2 * states / bytes_per_s + all_reduce_s(config, shape, hardware),
        stage_s=CALL_S + weights.stage_s,
        report_s=REPORT_S,
        pause_s=weights.pause_s,
        publish_delay_s=CALL_S + weights.before_pause_s + weights.to_nodes_s / inference.servers,
        cache_tokens=max(1.0, room / cache_bytes_per_token(config, shape)),
    )


def _read_parameters(shape: ModelShape, batch: float) -> float:
    """Parameters that a decoding step reads: all but the embedding, and the experts that some sequence chose."""
    always = shape.parameters - shape.outside_layers - shape.experts + (shape.head or shape.embedding)
    if not shape.num_experts:
        return always
    chosen = 1 - float((1 - shape.experts_per_token / shape.num_experts) ** batch)
    return always + shape.experts * chosen


def _train_flops(config: Config, shape: ModelShape, context: float) -> float:
    """Operations to train one token: weights, and attention over half of the context."""
    learner = config.learner
    backward = 2 * shape.computed * (1 if learner.lora.rank else 2) + 2 * _attention_flops(shape, context)
    return (1 + learner.gradient_checkpointing) * _forward_flops(shape, context) + backward


def _forward_flops(shape: ModelShape, context: float) -> float:
    return 2 * shape.computed + _attention_flops(shape, context)


def _attention_flops(shape: ModelShape, context: float) -> float:
    return 2 * context * shape.query * shape.layers


def _mean_context(load: MeasuredLoad) -> float:
    """Mean tokens that a sampled token attends to."""
    total = sum(tokens * (prompt + tokens / 2) for plan in load.episodes for tokens, prompt in _answers(plan))
    return total / max(1, sum(plan.tokens for plan in load.episodes))


def _answers(plan: EpisodePlan) -> list[tuple[int, int]]:
    return [(tokens, prompt) for (tokens, _), prompt in zip(plan.turns, plan.prompts, strict=True)]


def _assumed_load(config: Config, hardware: Hardware) -> MeasuredLoad:
    """Draw episodes from the assumptions of the hardware file; environments by their weights."""
    assumed, chance = hardware.episodes, random.Random(config.seed)
    length, time = (LogNormal(1.0, assumed.spread) for _ in range(2))
    weights = [env.weight for env in config.envs]
    plans = []
    for _ in range(DRAWN_EPISODES):
        (env,) = chance.choices(config.envs, weights)
        most = config.rollout.max_new_tokens
        turns, prompts, context = [], [], assumed.prompt_tokens
        count = max(1, min(env.max_turns, round(assumed.turn_share * env.max_turns * length.sample(chance))))
        factor, slowness = length.sample(chance), time.sample(chance)
        for _ in range(count):
            room = config.model.max_length - context
            tokens = min(most, room, max(1, round(assumed.answer_share * most * factor)))
            if tokens < 1:
                break
            turns.append((tokens, assumed.step_s * slowness))
            prompts.append(context)
            context += tokens + assumed.observation_tokens
        if turns:
            packed = prompts[-1] + turns[-1][0]
            plans.append(EpisodePlan(tuple(turns), 0.0, False, tuple(prompts), 0.0, packed))
    if not plans:
        raise ConfigError(
            f"episodes.prompt_tokens={assumed.prompt_tokens} of the hardware file fill model.max_length="
            f"{config.model.max_length}; lower the first"
        )
    return MeasuredLoad(tuple(plans), GroupEffects.normal(assumed.correlation))
