"""The built-in stage `reward_model`: a Hugging Face sequence-classification folder, in the driver's process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from roll_flash.errors import ModelError
from roll_flash.processes.background import call_in_thread
from roll_flash.types import Trajectory


class RewardModelStage:
    """Score: the model's output number `label` for the conversation, or its sigmoid.

    `path`: a folder with a model and its tokenizer. A conversation longer than `max_length` tokens loses its beginning.
    `device`: where it computes. Use one worker: calls would only share the same cores.
    """

    def __init__(
        self, path: str, *, label: int = 0, sigmoid: bool = False, max_length: int = 2048, device: str = "cpu"
    ) -> None:
        """Raises ModelError if there is no such folder."""
        self._path = Path(path).expanduser()
        if not (self._path / "config.json").is_file():
            raise ModelError(f"{self._path}: no such model folder")
        self._label = label
        self._sigmoid = sigmoid
        self._max_length = max_length
        self._device = device

    async def start(self) -> None:
        """Raises ModelError if the folder's model gives no score."""
        await call_in_thread(self._load)

    def score(self, trajectories: Sequence[Trajectory]) -> list[float]:
        import torch

        texts = [self._text(trajectory) for trajectory in trajectories]
        with torch.inference_mode():
            found = [self._outputs(text)[self._label] for text in texts]
            return [float(output.sigmoid() if self._sigmoid else output) for output in found]

    def _load(self) -> None:
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(self._path)
            self._model: Any = AutoModelForSequenceClassification.from_pretrained(self._path, dtype=torch.float32)
        except (OSError, ValueError) as error:
            raise ModelError(f"{self._path}: not a sequence-classification model: {error}") from None
        labels = self._model.config.num_labels
        if not 0 <= self._label < labels:
            raise ModelError(f"{self._path}: label {self._label} of a model with {labels} outputs")
        self._model.to(self._device).eval()

    def _outputs(self, text: str) -> Any:
        """Shape [labels]. One text at a time: padding would change what some models say."""
        import torch

        token_ids = self._tokenizer(text, add_special_tokens=False)["input_ids"][-self._max_length :]
        return self._model(torch.tensor([token_ids], device=self._device)).logits[0]

    def _text(self, trajectory: Trajectory) -> str:
        messages = [dict(message) for message in trajectory.messages]
        if self._tokenizer.chat_template:
            return str(self._tokenizer.apply_chat_template(messages, tokenize=False))
        return "\n".join(f"{message['role']}: {message['content']}" for message in messages)
