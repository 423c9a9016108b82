"""The tokenizer of a model folder: the one transformers would load, without torch where it can be."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from roll_flash.chat.tokenizer import load_tokenizer
from roll_flash.models.prepare import resolve_model

TEXT = "Zwölf <|im_start|> échelles\n\tat 3:00, 12+34=46 🙂"


@pytest.fixture(scope="module")
def folder() -> Path:
    return resolve_model("tiny")


def test_it_is_the_tokenizer_that_transformers_loads(folder: Path) -> None:
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(str(folder))
    assert type(ours) is type(theirs)
    assert ours.encode(TEXT) == theirs.encode(TEXT)
    assert ours.all_special_ids == theirs.all_special_ids
    messages = [{"role": "user", "content": TEXT}]
    assert ours.apply_chat_template(messages, tokenize=False) == theirs.apply_chat_template(messages, tokenize=False)


def test_a_process_that_only_tokenises_does_not_load_torch(folder: Path) -> None:
    program = (
        "import sys; from roll_flash.chat.tokenizer import load_tokenizer; "
        "load_tokenizer(sys.argv[1]).encode('a'); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program, str(folder)], timeout=120, check=False).returncode == 0


def test_a_folder_without_a_tokenizer_is_complained_about(tmp_path: Path) -> None:
    with pytest.raises((OSError, ValueError)):
        load_tokenizer(tmp_path)
