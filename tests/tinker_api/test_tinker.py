"""Tinker's own client and the own loop of tinker-cookbook, unmodified, against `roll-flash serve`."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from roll_flash.config.sections.learner import LoraConfig
from roll_flash.learner.model import lora
from roll_flash.models.prepare import resolve_model
from roll_flash.serving import RunningGateway
from tests.command_line import parse

pytestmark = [pytest.mark.adapters, pytest.mark.ray, pytest.mark.usefixtures("address")]

RANK, SEED = 4, 3
TEXTS = ([5, 6, 7, 8, 9, 10], [5, 6, 7, 20, 21], [30, 31, 32])
"""Two share their beginning: the learner computes it once."""


@contextmanager
def training(**options: Any) -> Iterator[Any]:
    """A session with a model in training."""
    import tinker

    with tinker.ServiceClient() as service:
        made = {"base_model": "tiny", "rank": RANK, "seed": SEED, **options}
        yield service.create_lora_training_client(**made).result()


def datums(texts: Sequence[Sequence[int]], inputs: Callable[[int], dict[str, list[float]]]) -> list[Any]:
    """Sequences that predict each next token; `inputs`: what the loss needs besides, for a number of tokens."""
    from tinker import types

    return [
        types.Datum(
            model_input=types.ModelInput.from_ints(list(text[:-1])),
            loss_fn_inputs={"target_tokens": list(text[1:]), **inputs(len(text) - 1)},
        )
        for text in texts
    ]


def weights(count: int) -> dict[str, list[float]]:
    return {"weights": [0.0, *(1.0 + place / 4 for place in range(count - 1))]}


def advantages(count: int) -> dict[str, list[float]]:
    return {"advantages": [(-1.0) ** place * 0.7 for place in range(count)], "logprobs": [-2.0] * count}


class Plain:
    """The same model and adapters in plain PyTorch: no packing, no ranks."""

    def __init__(self) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(resolve_model("tiny"), dtype=torch.float32)
        torch.manual_seed(SEED)
        lora.adapt(self.model, LoraConfig(rank=RANK))
        trained = [each for each in self.model.parameters() if each.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-2, betas=(0.9, 0.95), eps=0.1, weight_decay=0.01)

    def logprobs(self, text: Sequence[int]) -> torch.Tensor:
        logits = self.model(torch.tensor([text[:-1]])).logits[0]
        return logits.log_softmax(-1).gather(1, torch.tensor(text[1:])[:, None])[:, 0]

    def loss(self, name: str) -> torch.Tensor:
        """Tinker's own formulas, https://tinker-docs.thinkingmachines.ai/losses."""
        total = torch.zeros(())
        for text in TEXTS:
            found = self.logprobs(text)
            if name == "cross_entropy":
                total = total - (found * torch.tensor(weights(len(found))["weights"])).sum()
                continue
            given = {key: torch.tensor(values) for key, values in advantages(len(found)).items()}
            ratio = (found - given["logprobs"]).exp()
            clipped = ratio.clamp(0.8, 1.2)
            match name:
                case "importance_sampling":
                    objective = ratio * given["advantages"]
                case "ppo":
                    objective = torch.minimum(ratio * given["advantages"], clipped * given["advantages"])
                case "cispo":
                    objective = clipped.detach() * found * given["advantages"]
            total = total - objective.sum()
        return total

    def step(self, name: str) -> None:
        self.optimizer.zero_grad()
        self.loss(name).backward()
        self.optimizer.step()

    def merged(self) -> dict[str, torch.Tensor]:
        state = {name: each.detach() for name, each in self.model.state_dict().items() if "lora_" not in name}
        for name, layer in lora.adapters(self.model).items():
            state[name] = (layer.weight + layer.scale * layer.lora_b @ layer.lora_a).detach()
        return state


def test_steps_equal_those_of_plain_pytorch(server: RunningGateway) -> None:
    from tinker import types

    plain = Plain()
    # A large eps: else Adam divides the rounding of gradients that are next to nothing by itself.
    adam = types.AdamParams(learning_rate=1e-2, beta1=0.9, beta2=0.95, eps=0.1, weight_decay=0.01)
    with training() as client:
        for name in ("cross_entropy", "importance_sampling", "ppo", "cispo"):
            data = datums(TEXTS, weights if name == "cross_entropy" else advantages)
            # In two requests, with a forward pass between them, whose gradient must not count.
            parts = [client.forward_backward(data[:1], name), client.forward(data, name)]
            parts.append(client.forward_backward(data[1:], name))
            done = client.optim_step(adam)
            first, looked, second = (part.result() for part in parts)
            found = [each["logprobs"].to_numpy() for each in (*first.loss_fn_outputs, *second.loss_fn_outputs)]
            for text, values, seen in zip(TEXTS, found, looked.loss_fn_outputs, strict=True):
                wanted = plain.logprobs(text).detach().numpy()
                np.testing.assert_allclose(values, wanted, atol=1e-5)
                np.testing.assert_allclose(seen["logprobs"].to_numpy(), wanted, atol=1e-5)
            loss = plain.loss(name).item()
            assert first.metrics["loss:sum"] + second.metrics["loss:sum"] == pytest.approx(loss, abs=1e-4)
            assert done.result().metrics["skipped:mean"] == 0
            plain.step(name)
        path = client.save_weights_for_sampler("steps").result().path
    folder = server.episodes.parent / "checkpoints" / path.split("/")[2].replace(":", "-") / "sampler_weights" / "steps"
    exported = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    moved = 0.0
    start = AutoModelForCausalLM.from_pretrained(resolve_model("tiny"), dtype=torch.float32).state_dict()
    for name, wanted in plain.merged().items():
        torch.testing.assert_close(exported[name], wanted, atol=1e-5, rtol=0)
        moved = max(moved, float((wanted - start[name]).abs().max()))
    assert moved > 1e-3


def test_what_is_sampled_has_the_log_probabilities_of_the_trained_weights() -> None:
    from tinker import types

    with training() as client:
        client.forward_backward(datums(TEXTS, weights), "cross_entropy").result()
        client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        sampler = client.save_weights_and_get_sampling_client().result()
        prompt = types.ModelInput.from_ints([5, 6, 7])
        answer = sampler.sample(prompt, 3, types.SamplingParams(max_tokens=6, seed=1)).result()
        assert len({tuple(each.tokens) for each in answer.sequences}) > 1
        for each in answer.sequences:
            text = [5, 6, 7, *each.tokens]
            (found,) = client.forward(datums([text], weights), "cross_entropy").result().loss_fn_outputs
            np.testing.assert_allclose(found["logprobs"].to_numpy()[2:], each.logprobs, atol=1e-4)
            scored = sampler.compute_logprobs(types.ModelInput.from_ints(text)).result()
            np.testing.assert_allclose(scored[1:], found["logprobs"].to_numpy(), atol=1e-4)


def test_a_saved_state_goes_on_as_if_nothing_had_happened() -> None:
    import tinker

    adam = tinker.AdamParams(learning_rate=1e-2)
    data = datums(TEXTS, weights)

    def step(client: Any) -> float:
        loss = client.forward_backward(data, "cross_entropy").result().metrics["loss:sum"]
        client.optim_step(adam).result()
        return float(loss)

    with training() as client:
        step(client)
        path = client.save_state("middle").result().path
        wanted = [step(client) for _ in range(3)]
    with tinker.ServiceClient() as service:
        client = service.create_training_client_from_state_with_optimizer(path).result()
        assert client.get_info().lora_rank == RANK
        assert [step(client) for _ in range(3)] == pytest.approx(wanted, abs=1e-5)
    with tinker.ServiceClient() as service:
        client = service.create_training_client_from_state(path).result()
        anew = [step(client) for _ in range(3)]
    assert anew[0] == pytest.approx(wanted[0], abs=1e-5)
    assert anew[2] != pytest.approx(wanted[2], abs=1e-4)  # the optimizer began again


def test_what_is_not_supported_is_refused_in_one_line() -> None:
    import tinker
    from tinker import types

    params = types.SamplingParams(max_tokens=2)
    prompt = types.ModelInput.from_ints([5, 6, 7])
    with tinker.ServiceClient() as service:
        with pytest.raises(tinker.NotFoundError, match="not served here; ask for"):
            service.create_lora_training_client(base_model="Qwen/Qwen3-8B").result()
        base = service.create_sampling_client(base_model="tiny").result()
        client = service.create_lora_training_client(base_model="tiny", rank=RANK).result()
        assert base.sample(prompt, 1, params).result().sequences  # new adapters change nothing yet
        with pytest.raises(tinker.BadRequestError, match="one is trained at a time"):
            service.create_lora_training_client(base_model="tiny", rank=RANK).result()
        old = client.save_weights_and_get_sampling_client().result()
        follows = client.save_weights_and_get_sampling_client(kind="inflight").result()
        for loss, inputs, words in (
            ("dro", advantages, "not computed here; choose one of cross_entropy"),
            ("importance_sampling", weights, "not read by this loss"),
            ("cross_entropy", lambda count: {"weights": [float("nan")] * count}, "not finite"),
        ):
            with pytest.raises(tinker.BadRequestError, match=words):
                client.forward_backward(datums(TEXTS, inputs), loss).result()
        with pytest.raises(tinker.BadRequestError, match="token ids must be from 0 to"):
            client.forward_backward(datums([[5, 10**6]], weights), "cross_entropy").result()
        client.forward_backward(datums(TEXTS, weights), "cross_entropy").result()
        client.optim_step(types.AdamParams()).result()
        new = client.save_weights_and_get_sampling_client().result()
        assert new.sample(prompt, 1, params).result().sequences
        assert follows.sample(prompt, 1, params).result().sequences
        for replaced in (old, base):
            with pytest.raises(tinker.TinkerError, match="were replaced on the servers"):
                replaced.sample(prompt, 1, params).result()
        with pytest.raises(tinker.BadRequestError, match="topk_sample_logprobs: not computed here"):
            new.sample(prompt, 1, params, topk_sample_logprobs=2).result()
        with pytest.raises(tinker.BadRequestError, match="none of the model's end tokens"):
            new.sample(prompt, 1, types.SamplingParams(max_tokens=2, stop=[9])).result()
        with pytest.raises(tinker.BadRequestError, match="1 to 100 letters"):
            client.save_state("../x").result()


def test_the_page_does_as_it_says(server: RunningGateway, capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "tinker.md").read_text()
    (command,) = re.findall(r"```sh\n(.*?)\n```", page, re.DOTALL)
    parse(command.split()[1:])
    (script,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(compile(script.replace("http://127.0.0.1:8322", server.url), "docs/tinker.md", "exec"), {})
    *steps, logprobs = capsys.readouterr().out.splitlines()
    losses = [float(line.split()[0]) for line in steps]
    assert len(losses) == 8
    assert losses[-1] < losses[0] / 2
    assert len(json.loads(logprobs)) >= 1


def test_nothing_is_answered_without_the_key(server: RunningGateway) -> None:
    paths = [re.sub(r"{\w+}", "x", each.canonical) for each in server.routes.gateway.app.router.resources()]
    tried = [path for path in paths if path.startswith("/api/")]
    assert len(tried) > 15
    for path in tried:
        for method in ("GET", "POST"):
            answer = httpx.request(method, server.url + path, json={}, headers={"X-API-Key": "tml-wrong"})
            assert answer.status_code in (401, 405), path


def test_a_client_that_ends_leaves_room_for_the_next() -> None:
    for _ in range(2):
        with training() as client:
            assert client.model_id


def test_the_own_loop_of_tinker_cookbook_learns(tmp_path: Path) -> None:
    from loop_of_the_cookbook import config
    from tinker_cookbook.rl.train import main

    asyncio.run(main(config(tmp_path, str(resolve_model("tiny")))))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    rewards = [line["env/all/reward/total"] for line in lines if "env/all/reward/total" in line]
    print("rewards", [round(each, 3) for each in rewards])
    assert len(rewards) >= 10
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.4
