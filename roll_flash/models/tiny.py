"""Writes the tiny model: a Qwen3 with 0.6 M random parameters and one token per character.

It is untrained, but it passes through servers, learner and files like a real model, in milliseconds. Its weights are
the same on every machine with the same torch version.
"""

from __future__ import annotations

import string
from pathlib import Path

CHARACTERS = "\n" + "".join(sorted(set(string.printable) - set(string.whitespace))) + " "
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|unknown|>")
VOCABULARY_MULTIPLE = 64
MAX_SPECIAL_TOKENS = 64

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write(folder: Path) -> None:
    """Write model and tokenizer into an empty folder."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokens = vocabulary()
    config = Qwen3Config(
        vocab_size=len(tokens),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        # Large enough to make the next-token distribution far from uniform, so that errors show in logprobs.
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=tokens.index("<|im_end|>"),
        pad_token_id=tokens.index("<|endoftext|>"),
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    write_tokenizer(folder, tokens)


def vocabulary(size: int | None = None) -> list[str]:
    """Return special tokens, characters, and reserved tokens up to `size` (None: a multiple of 64): every id can be
    decoded."""
    tokens = [*SPECIAL_TOKENS, *CHARACTERS]
    padding = -len(tokens) % VOCABULARY_MULTIPLE if size is None else size - len(tokens)
    return tokens + [f"<|reserved_{number}|>" for number in range(padding)]


def write_tokenizer(folder: Path, tokens: list[str]) -> None:
    """Write a tokenizer for `vocabulary` that makes one token of each character."""
    from tokenizers import AddedToken, Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    numbers = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=numbers, merges=[], unk_token="<|unknown|>"))
    tokenizer.decoder = decoders.Fuse()
    # Thousands of special tokens would make each load of the tokenizer slow.
    special = [token for token in tokens if len(token) > 1][:MAX_SPECIAL_TOKENS]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<|unknown|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        model_max_length=32768,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
