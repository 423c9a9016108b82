"""What the workers are told about the servers."""

from __future__ import annotations

from pathlib import Path

from roll_flash.config.tree import InferenceConfig, load_config
from roll_flash.engines.inference import ClientSpec
from roll_flash.inference.client.metrics import combined
from roll_flash.inference.open import open_engine
from roll_flash.inference.servers.metrics import kv_cache_tokens, logged_figures
from roll_flash.models.prepare import resolve_model
from roll_flash.models.tiny import vocabulary
from roll_flash.system.system import worker_settings

METRICS = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="policy"} 3.0
vllm:num_requests_running{engine="1",model_name="policy"} 4.0
vllm:kv_cache_usage_perc{engine="0",model_name="policy"} 2.5e-01
vllm:cache_config_info{block_size="16",cache_dtype="auto",num_gpu_blocks="100",num_cpu_blocks="None"} 1.0
python_gc_objects_collected_total{generation="0"} 1.0
"""


def test_groups_that_are_not_replicated_are_pinned_and_capacity_is_shared_among_the_workers() -> None:
    tree = {"model": {"path": "tiny"}, "envs": [{"id": "ShellMath-v0"}], "rollout": {"workers": 3}}
    spec = ClientSpec("vllm", ("http://a:1",), "m", 512, capacity_tokens=(300.0,))
    pinned = load_config(tree, ["scheduler.replicate=false"])
    settings = worker_settings(pinned, spec, Path("m"), needs_sandbox=False)
    assert isinstance(settings.model, ClientSpec)
    assert (settings.model.clients, settings.pins_groups) == (3, True)
    assert not worker_settings(load_config(tree), spec, Path("m"), needs_sandbox=False).pins_groups


def test_a_servers_capacity_is_what_it_says_itself() -> None:
    assert kv_cache_tokens(METRICS) == 1600
    assert kv_cache_tokens("nothing of that kind") is None
    assert kv_cache_tokens('vllm:cache_config_info{block_size="16",num_gpu_blocks="None"} 1.0') is None
    assert logged_figures(METRICS) == {"requests_running": 7.0, "kv_cache_usage": 0.25, "kv_cache_tokens": 1600.0}


def test_a_server_that_tells_no_capacity_has_no_limit(tmp_path: Path) -> None:
    def spec(**settings: float) -> ClientSpec:
        config = InferenceConfig(engine="transformers", **settings)
        engine = open_engine(config, model_folder=resolve_model("tiny"), max_model_len=8, logs=tmp_path)
        return engine.client_spec()

    assert spec().capacity_tokens == (float("inf"),)
    assert spec(admission_ratio=0).capacity_tokens == ()
    assert (spec().stream_every, spec().health_timeout_s) == (64, 30.0)
    assert spec().vocabulary == len(vocabulary())


def test_the_figures_of_many_clients_are_added_up_and_the_longest_wait_is_that_of_any() -> None:
    clients = [{"requests": 2.0, "queue_longest_wait_s": 0.5}, {"requests": 3.0, "queue_longest_wait_s": 0.25}]
    assert combined(clients) == {"requests": 5.0, "queue_longest_wait_s": 0.5}
