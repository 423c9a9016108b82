"""The messages of Tinker's clients that are Protocol Buffers: gradients that they ask for, and results.

`SCHEMA` has the fields that are read and written here, with the numbers that `tinker` 0.38 gives them. Data of another
kind than text, and targets that are no plain tensor, are refused: silently left out, they would change the loss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from roll_flash.engines.inference import Generation
from roll_flash.engines.learner import NamedLoss
from roll_flash.gateway.apis.api_error import ApiError, bad_request, unsupported
from roll_flash.learner.packing.rows import TrainSequence

PROTOBUF = "application/x-protobuf"
SCHEMA = """
EncodedText: bytes tokens=1
Chunk: EncodedText encoded_text=1
Tensor: bytes dense=1, int32 dtype=3, int64* shape=4
LossInput: string key=1, Tensor value=2
Datum: Chunk* model_input=1, LossInput* loss_fn_inputs=2
Value: double number=1, string text=2
Parameter: string key=1, Value value=2
ForwardBackwardRequest: string model_id=1, int32 seq_id=2, Datum* data=3, string loss_fn=4, bool forward_only=6, Parameter* parameters=7
BatchedTensor: bytes data=1, bytes offsets=2, int32 dtype=3
Field: string key=1, BatchedTensor value=2
ArrayRecord: string type_tag=1, Field* fields=2, int64 num_datums=3
Metric: string key=1, double value=2
ForwardBackwardOutput: string loss_fn_output_type=1, ArrayRecord* loss_fn_outputs=2, Metric* metrics=3
SampledSequence: int32 stop_reason=1, bytes tokens=2, bytes logprobs=3
SampleResponse: SampledSequence* sequences=1, bytes prompt_logprobs=2
"""  # noqa: E501 - a message a line; a map is a list of its entries
FLOAT32, INT64 = 1, 2
"""Tensor's `dtype`."""
STOP, LENGTH = 0, 1
"""`stop_reason` of a sequence."""
MAX_DATA = 1024
"""Sequences of one request; the client splits larger ones."""


@dataclass(frozen=True, slots=True)
class _Loss:
    """`name` in `learner/losses/policy.py`, the input that multiplies each token's loss, and those it needs besides."""

    name: str
    weight: str
    needs: tuple[str, ...] = ()
    clips: bool = False


LOSSES = {
    "cross_entropy": _Loss("reinforce", "weights"),  # -weight log pi
    "importance_sampling": _Loss("m2po", "advantages", ("logprobs",)),
    "ppo": _Loss("ppo", "advantages", ("logprobs",), clips=True),
    "cispo": _Loss("cispo", "advantages", ("logprobs",), clips=True),
}
CLIPS = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
"""Bounds of the ratio, and Tinker's defaults."""


@dataclass(frozen=True, slots=True, eq=False)
class GradientRequest:
    """A request for the gradient of a loss over sequences, or with `forward_only` for their log-probabilities."""

    model_id: str
    seq_id: int
    loss: NamedLoss
    sequences: list[TrainSequence]
    forward_only: bool


def read_gradient_request(content: bytes, *, vocabulary: int, max_length: int) -> GradientRequest:
    """Raises ApiError for a body that is wrong, or asks for what is not supported."""
    request = _TYPES["ForwardBackwardRequest"]()
    try:
        request.ParseFromString(content)
    except DecodeError as error:
        raise bad_request(f"the body is no ForwardBackwardRequest: {error}") from None
    loss = LOSSES.get(request.loss_fn)
    if loss is None:
        raise unsupported(
            "loss_fn", f"{request.loss_fn[:40]!r} is not computed here; choose one of {', '.join(LOSSES)}"
        )
    if not 1 <= len(request.data) <= MAX_DATA:
        raise bad_request(f"data: {len(request.data)} sequences; send 1 to {MAX_DATA} at a time", "data")
    sequences = [_sequence(f"data[{place}]", datum, loss, vocabulary) for place, datum in enumerate(request.data)]
    longest = max(len(each.token_ids) for each in sequences) - 1
    if longest > max_length:
        message = f"data: a sequence of {longest} tokens, and the model takes {max_length}; see model.max_length"
        raise ApiError(413, "request_too_large", message)
    parameters = _clips(request.parameters) if loss.clips else {}
    if len(request.parameters) and not loss.clips:
        raise unsupported("loss_fn_config", f"{request.loss_fn} takes no parameters here")
    named = NamedLoss(loss.name, parameters)
    return GradientRequest(request.model_id, request.seq_id, named, sequences, request.forward_only)


def _clips(parameters: Any) -> dict[str, float]:
    given = {each.key: each.value.number for each in parameters}
    if unknown := (set(given) - set(CLIPS)) | {each.key for each in parameters if each.value.text}:
        raise unsupported("loss_fn_config", f"{sorted(unknown)[0][:40]!r}; known are {', '.join(CLIPS)}")
    low, high = ((CLIPS | given)[name] for name in CLIPS)
    if not 0 <= low <= 1 <= high < np.inf:
        raise bad_request("loss_fn_config: 0 <= clip_low_threshold <= 1 <= clip_high_threshold", "loss_fn_config")
    return {"clip_low": 1 - low, "clip_high": high - 1}


def _sequence(where: str, datum: Any, loss: _Loss, vocabulary: int) -> TrainSequence:
    """Return a sequence whose token i + 1 is predicted from the first i + 1 tokens of the input: its targets may be
    others than the tokens of the input."""
    if not all(chunk.HasField("encoded_text") for chunk in datum.model_input):
        raise unsupported(f"{where}.model_input", "only text is computed here, no images and no sound")
    encoded = b"".join(chunk.encoded_text.tokens for chunk in datum.model_input)
    if len(encoded) % np.int32().itemsize:
        raise bad_request(f"{where}.model_input: {len(encoded)} bytes are no int32 token ids")
    tokens = np.frombuffer(encoded, np.int32)
    given = {each.key: _tensor(f"{where}.{each.key}", each.value) for each in datum.loss_fn_inputs}
    wanted = ("target_tokens", loss.weight, *loss.needs)
    if unknown := set(given) - set(wanted):
        raise unsupported(
            f"{where}.{sorted(unknown)[0][:40]}", f"not read by this loss, which takes {', '.join(wanted)}"
        )
    if loss.weight == "weights" and "target_tokens" in given:
        given.setdefault("weights", np.ones(len(tokens), np.float32))
    for name in wanted:
        if name not in given or given[name].shape != tokens.shape:
            found = "nothing" if name not in given else f"the shape {list(given[name].shape)}"
            raise bad_request(f"{where}.{name} must have one number for each of the {len(tokens)} tokens, not {found}")
        if not np.isfinite(given[name]).all():
            raise bad_request(f"{where}.{name} has a number that is not finite")
    targets = given["target_tokens"]
    if targets.dtype != np.int64:
        raise unsupported(f"{where}.target_tokens", "token ids that are no int64")
    for ids in (tokens, targets):
        if not len(ids) or ids.min() < 0 or ids.max() >= vocabulary:
            raise bad_request(f"{where}: token ids must be from 0 to {vocabulary - 1}, and at least one")

    def shifted(values: NDArray[Any]) -> NDArray[Any]:
        return np.concatenate([np.zeros(1, values.dtype), values])

    nothing = np.zeros(len(tokens) + 1, np.int32)
    return TrainSequence(
        token_ids=np.append(tokens, targets[-1]).astype(np.int32),
        policy_mask=np.arange(len(tokens) + 1) > 0,
        behavior_logprobs=shifted(given["logprobs"] if loss.needs else nothing[1:]).astype(np.float32),
        versions=nothing,
        advantages=shifted(given[loss.weight]).astype(np.float32),
        targets=shifted(targets),
    )


def _tensor(where: str, tensor: Any) -> NDArray[Any]:
    kinds = {FLOAT32: np.float32, INT64: np.int64}
    if tensor.dtype not in kinds:
        raise unsupported(where, f"a tensor of the type {tensor.dtype}; send float32 or int64")
    shape = tuple(tensor.shape) or (-1,)
    try:
        return np.frombuffer(tensor.dense, kinds[tensor.dtype]).reshape(shape)
    except ValueError:
        raise unsupported(
            where, f"it has not the numbers of its shape {list(shape)}; sparse ones are not read"
        ) from None


def gradient_output(logprobs: Sequence[NDArray[np.float32]], metrics: Mapping[str, float]) -> bytes:
    """Return a ForwardBackwardOutput."""
    ends = np.cumsum([0, *(each.nbytes for each in logprobs)], dtype=np.int64)
    tensor = {"data": np.concatenate(logprobs).tobytes(), "offsets": ends.tobytes(), "dtype": FLOAT32}
    record = {"fields": [{"key": "logprobs", "value": tensor}], "num_datums": len(logprobs)}
    found = [{"key": name, "value": value} for name, value in metrics.items()]
    return _encoded("ForwardBackwardOutput", loss_fn_output_type="ArrayRecord", loss_fn_outputs=[record], metrics=found)


def sample_output(generations: Sequence[Generation], prompt_logprobs: NDArray[np.float32] | None) -> bytes:
    """Return a SampleResponse. `prompt_logprobs`: [T], NaN where there is none."""
    sequences = [
        {
            "stop_reason": LENGTH if each.finish_reason == "length" else STOP,
            "tokens": each.token_ids.tobytes(),
            "logprobs": each.logprobs.tobytes(),
        }
        for each in generations
    ]
    prompt = {} if prompt_logprobs is None else {"prompt_logprobs": prompt_logprobs.tobytes()}
    return _encoded("SampleResponse", sequences=sequences, **prompt)


def _encoded(name: str, **fields: Any) -> bytes:
    found: bytes = _TYPES[name](**fields).SerializeToString()
    return found


def _compiled(schema: str) -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="roll_flash/tinker.proto", package="tinker", syntax="proto3")
    kinds = descriptor_pb2.FieldDescriptorProto
    for line in schema.strip().splitlines():
        name, _, fields = line.partition(": ")
        message = file.message_type.add(name=name)
        for field in fields.split(", "):
            kind, _, rest = field.partition(" ")
            field_name, number = rest.split("=")
            label = kinds.LABEL_REPEATED if kind.endswith("*") else kinds.LABEL_OPTIONAL
            kind = kind.rstrip("*")
            made = message.field.add(name=field_name, number=int(number), label=label)
            if kind[0].isupper():
                made.type, made.type_name = kinds.TYPE_MESSAGE, f".tinker.{kind}"
            else:
                made.type = kinds.Type.Value(f"TYPE_{kind.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return {
        message.name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"tinker.{message.name}"))
        for message in file.message_type
    }


_TYPES = _compiled(SCHEMA)
