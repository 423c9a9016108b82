"""Recipes of configs/gpu: each fits on the machines that it names, by arithmetic and on a fake cluster; not on half."""

from __future__ import annotations

from pathlib import Path

import gymnasium
import pytest
from recipe_tables import machines_of, plan_recipe, recipes, with_table

import roll_flash.envs
from roll_flash.config.tree import load_config
from roll_flash.errors import PlacementError
from roll_flash.planner.machines.hardware import Hardware, load_hardware

CONFIGS = Path(__file__).parents[2] / "configs"
RECIPES = {path.stem: path for path in recipes(CONFIGS / "gpu")}
each_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES.keys())


def half_of(hardware: Hardware) -> Hardware:
    """Half the nodes, else half the GPUs, else half the memory of the only GPU."""
    if hardware.nodes > 1:
        return hardware.model_copy(update={"nodes": hardware.nodes // 2})
    if hardware.gpus_per_node > 1:
        return hardware.model_copy(update={"gpus_per_node": hardware.gpus_per_node // 2})
    gpu = hardware.gpu.model_copy(update={"memory_gib": hardware.gpu.memory_gib / 2})
    return hardware.model_copy(update={"gpu": gpu})


def test_every_size_has_a_recipe() -> None:
    assert set(RECIPES) == {
        "qwen3-0.6b-1x24gb",
        "qwen3-0.6b-1x80gb",
        "qwen3-4b-lora-1x80gb",
        "qwen3-8b-lora-1x80gb",
        "qwen3-4b-2x80gb",
        "qwen3-4b-8x80gb",
        "qwen3-8b-8x80gb",
        "qwen3-30b-a3b-lora-8x80gb",
        "qwen3-8b-32k-4x8x80gb",
        "qwen3-30b-a3b-4x8x80gb",
    }


@each_recipe
def test_a_recipe_is_placed_on_its_machines_and_uses_all_their_gpus(recipe: Path) -> None:
    config, hardware = load_config(recipe), machines_of(recipe)
    plan = plan_recipe(config, hardware)
    on_gpus = [row for row in plan.rows if row.part.gpus]
    assert sum(row.part.gpus for row in on_gpus) == hardware.gpus
    assert all(len(row.gpus) == max(1, row.part.gpus) for row in on_gpus)


@each_recipe
def test_a_recipe_is_refused_on_half_of_its_machines(recipe: Path) -> None:
    with pytest.raises(PlacementError):
        plan_recipe(load_config(recipe), half_of(machines_of(recipe)))


@each_recipe
def test_the_memory_table_of_a_recipe_is_current(recipe: Path) -> None:
    assert recipe.read_text() == with_table(recipe), "python tests/planner/recipe_tables.py"


@each_recipe
def test_the_environments_of_a_recipe_ship(recipe: Path) -> None:
    assert roll_flash.envs.make_env
    for env in load_config(recipe).envs:
        assert gymnasium.spec(env.id)


def test_a_recipe_for_24_gb_fits_on_every_gpu_of_that_size() -> None:
    config = load_config(RECIPES["qwen3-0.6b-1x24gb"])
    for file in (CONFIGS / "hardware").glob("*-24gb.yaml"):
        assert plan_recipe(config, load_hardware(file)).uses_gpus


@pytest.mark.parametrize("file", sorted((CONFIGS / "hardware").glob("*.yaml")), ids=lambda path: path.stem)
def test_a_hardware_file_has_figures_with_their_source(file: Path) -> None:
    gpu = load_hardware(file).gpu
    assert "NVIDIA" in gpu.name
    assert "datasheet" in gpu.source or "whitepaper" in gpu.source or "brief" in gpu.source
    assert f"{gpu.memory_gib:g}gb" in file.stem
    assert (gpu.network_gb_s != 1.25) == ("network: " in gpu.source)
    # What would be a typing error: operations for each byte read, of any GPU so far.
    assert 50 < 1000 * gpu.bf16_tflops / gpu.hbm_gb_s < 450
