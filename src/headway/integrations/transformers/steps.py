"""Decoding steps as single native calls, inside a model of `transformers`.

If the stack's forward is called for one more token of each row, its cache holds whole rows, and its layers are those of
a `headway.models.Decoder`, then a decoder on the same weights computes the step (`headway.models.decode_step`), and the
cache shows the result. Every other call is computed as before. In both cases the cache grows in place.

Legend: B rows, M width, K kv heads, S tokens so far, T new ones, C capacity in tokens, D per head.
"""

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer
from transformers.modeling_outputs import BaseModelOutputWithPast

from headway.cache import PAGE, CacheSpec, PagedCache, PagedLayer, PageTable
from headway.cache.paged_step import PagedStep
from headway.checkpoints.hf.config import spec_from_config, tensor_names
from headway.checkpoints.hf.layouts.tensors import OWN_NAMES
from headway.errors import HeadwayError
from headway.integrations.transformers.modules import SEED, relative
from headway.integrations.transformers.products import beside
from headway.models import Decoder, blank
from headway.models.decode_step import DecodeStep
from headway.models.lowering import Lowered
from headway.nn import linears

STEPS = "_headway_steps"
CLOSE = {torch.float32: 1e-4, torch.bfloat16: 0.1}
"""Maximum difference between two computations of the same stack, relative to the largest number: the rounding of some
tens of layers. If it is larger, the stacks are different."""
CACHE = next(f.name for f in fields(BaseModelOutputWithPast) if f.name in ("cache", "past_key_values"))
"""The name of the cache among arguments and results: "past_key_values" before transformers 5.24."""
GIVEN = ("input_ids", "attention_mask", "position_ids", CACHE, "inputs_embeds", "use_cache")
"""The arguments of a stack that a step may have, in order."""
SAMPLE = 5
"""Number of tokens before the step that is compared."""


class GrowingLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """A `DynamicLayer` whose keys and values [B, K, S, D] are the beginning of memory [B, K, C, D] that doubles when it
    is full: new tokens are written in place, without copying the old ones. C is a multiple of 64."""

    _room: tuple[Tensor, Tensor] | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Adds the keys and values of new tokens [B, K, T, D] and returns those of all tokens. Tensors that require a
        gradient are concatenated as in `DynamicLayer`."""
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            self._room = None
            return super().update(key_states, value_states, *args, **kwargs)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        past = self.get_seq_length()
        count = past + key_states.shape[2]
        rooms = self.with_room(count, key_states, value_states)
        for room, new in zip(rooms, (key_states, value_states), strict=True):
            room[:, :, past:count] = new
        return self.show(count)

    def with_room(self, count: int, *like: Tensor) -> tuple[Tensor, Tensor]:
        """Returns memory for `count` keys and values that begins with the current ones: the same memory if they are in
        it and it is large enough, else new memory, with the other sizes and the dtype of `like`."""
        current: tuple[Any, ...] = self.keys, self.values
        if (
            self._room is None
            or not all(map(_is_begin, current, self._room))
            or self._room[0].shape[2] < count
        ):
            capacity = -(-2 * count // PAGE) * PAGE
            keys, values = (t.new_empty(*t.shape[:2], capacity, t.shape[3]) for t in like)
            if past := self.get_seq_length():
                keys[:, :, :past], values[:, :, :past] = current
            self._room = keys, values
        return self._room

    def show(self, count: int) -> tuple[Tensor, Tensor]:
        """Sets the keys and values to the first `count` of the memory, and returns them."""
        assert self._room is not None
        self.keys, self.values = (room[:, :, :count] for room in self._room)
        return self.keys, self.values


def _is_begin(tensor: Tensor, room: Tensor) -> bool:
    where = tensor.data_ptr(), tensor.stride(), tensor.shape[0]
    return where == (room.data_ptr(), room.stride(), room.shape[0])


def growing(cache: Cache) -> None:
    """Makes those layers of a cache grow in place that would concatenate tensors for each token."""
    for layer in cache.layers:
        if type(layer) is DynamicLayer:
            layer.__class__ = GrowingLayer
    if cache.layer_class_to_replicate is DynamicLayer:
        cache.layer_class_to_replicate = GrowingLayer


class Steps:
    """The decoder on a stack's weights, and the state of each cache. A copy of the model starts without them."""

    def __init__(self) -> None:
        self.decoder: Decoder | None = None
        self.weights: tuple[tuple[str, int], ...] = ()
        self.live: WeakKeyDictionary[Cache, Live] = WeakKeyDictionary()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Steps":
        return Steps()

    def __reduce__(self) -> tuple[Any, ...]:
        return Steps, ()


class Live:
    """A cache of transformers, and a paged cache of the same tokens in the same memory.

    The memory [B, K, C, D], where C is a multiple of 64 tokens, is also divided into pages: slot s of row b is number b
    K C + s, and the next head is C D numbers further. For B = 2, K = 3, C = 128, row 1 begins with page 6."""

    def __init__(self, decoder: Decoder, cache: Any) -> None:
        growing(cache)
        batch, heads, count, size = cache.layers[0].keys.shape
        spec = CacheSpec(kv_heads=heads, head_dim=size, dtype=cache.layers[0].keys.dtype)
        self.pages = PagedCache(spec, decoder.spec.patterns)
        classes = self.pages.pool.classes
        self.tables = [PageTable(b"", [0] * count, [[] for _ in classes]) for _ in range(batch)]
        self.room: tuple[Tensor, Tensor] | None = None
        self.shown = [theirs.keys for theirs in cache.layers]
        self.step = DecodeStep(decoder, self.pages)

    def read(self, x: Tensor, cache: Any) -> Tensor:
        """Returns the last hidden states for embeddings [B, 1, M] of the next token of each row, and adds that token to
        the cache."""
        for table in self.tables:
            table.ids.append(0)
        count = len(self.tables[0])
        rooms = [theirs.with_room(count, theirs.keys, theirs.values) for theirs in cache.layers]
        is_moved, self.room = rooms[0] is not self.room, rooms[0]
        if is_moved:
            for layer, room in zip(self.pages.layers, rooms, strict=True):
                assert isinstance(layer, PagedLayer)
                layer.tensors = tuple(map(_as_slots, room))
        if is_moved or count % PAGE == 1:
            pages, row = -(-count // PAGE), rooms[0][0].stride(0) // rooms[0][0].stride(2) // PAGE
            for b, table in enumerate(self.tables):
                table.version += 1
                table.pages[:] = [[*range(b * row, b * row + pages)] for _ in table.pages]
        self.pages.step = PagedStep(self.pages.pool.classes, x.device, [(t, [0]) for t in self.tables])
        states = self.step.states(x.transpose(0, 1), self.pages.step.tokens).transpose(0, 1)
        self.shown = [theirs.show(count)[0] for theirs in cache.layers]
        return states

    def is_of(self, cache: Any) -> bool:
        """Returns whether the cache is as the last step left it."""
        return all(a is b.keys for a, b in zip(self.shown, cache.layers, strict=True))


def _as_slots(room: Tensor) -> Tensor:
    """Returns memory [B, K, C, D] as one row of slots, [1, K, (B - 1) K C + C, D]; see `Live`."""
    batch, heads, capacity, size = room.shape
    slots = (batch - 1) * heads * capacity + capacity
    return room.as_strided((1, heads, slots, size), (0, capacity * size, size, 1))


def stack_forward(self: Any, *args: Any, **named: Any) -> Any:
    """The forward of a `LlamaModel` or similar, which computes decoding steps by the kernels if it can."""
    arguments = {**dict.fromkeys(GIVEN), **dict(zip(GIVEN, args, strict=False)), **named}
    x, cache = arguments["inputs_embeds"], arguments[CACHE]
    if _is_step(self, arguments) and (live := _live(self, cache)) is not None:
        states = live.read(self.get_input_embeddings()(arguments["input_ids"]) if x is None else x, cache)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(states), **{CACHE: cache})
    return type(self).forward(self, *args, **named)


def _is_step(self: Any, arguments: Mapping[str, Any]) -> bool:
    """Returns whether a call is for the next token of rows without padding, and nothing else."""
    ids, mask, positions, cache, x, use_cache = (arguments.get(name) for name in GIVEN)
    rows = ids if x is None else x
    if type(cache) is not DynamicCache or (ids is None) == (x is None) or rows is None:
        return False
    past, extra = cache.get_seq_length(), arguments.keys() - {*GIVEN, "return_dict"}
    layers: list[Any] = cache.layers
    return (
        not (use_cache is False or self.training or torch.is_grad_enabled())
        and (rows.shape[1] == 1 and rows.is_cpu)
        and all(arguments[name] in (None, False) for name in extra)
        and not (
            arguments.get("return_dict") is False or torch.is_autocast_enabled("cpu") or cache.offloading
        )
        and all(type(layer) in (DynamicLayer, GrowingLayer) for layer in layers)
        and bool(past and len(layers) == len(self.layers) and len(layers[0].keys) == len(rows))
        and (positions is None or bool((positions == past).all()))
        and (
            mask is None
            or (isinstance(mask, Tensor) and mask.shape == (len(rows), past + 1) and bool(mask.all()))
        )
    )


def _live(self: Any, cache: Any) -> Live | None:
    """Returns the `Live` that computes the steps of this cache; None if the model has hooks, or other parameters than
    before."""
    steps: Steps = self.__dict__[STEPS]
    live = steps.live.get(cache)
    if live is not None and live.is_of(cache):
        return live
    decoder = _decoder(self, steps)
    if decoder is None:
        return None
    steps.live[cache] = live = Live(decoder, cache)
    return live


def _decoder(self: Any, steps: Steps) -> Decoder | None:
    weights = _weights(self)
    if any(m._forward_hooks or m._forward_pre_hooks for m in self.modules() if m is not self):
        return None
    if weights != steps.weights:
        if steps.weights and [n for n, _ in weights] != [n for n, _ in steps.weights]:
            return None
        steps.decoder, steps.weights = decoder_of(self), weights
    return steps.decoder


def _weights(stack: Any) -> tuple[tuple[str, int], ...]:
    """Returns the addresses of the stack's weights, by name."""
    return tuple((name, p.data_ptr()) for name, p in stack.named_parameters())


def decoder_of(stack: Any) -> Decoder:
    """Returns a decoder whose blocks share the weights of a stack. Raises HeadwayError if no decoder computes the
    same."""
    config = json.loads(stack.config.to_json_string(use_diff=True))
    if tensor_names(config) is not OWN_NAMES:
        raise HeadwayError(f"the tensor names of {type(stack).__name__} are unknown")
    with torch.device("meta"):
        model = blank(spec_from_config(config))
    assert isinstance(model, Decoder)
    if any(model.spec.experts):
        raise HeadwayError(f"{type(stack).__name__} has experts, which native steps do not know")
    state = {f"model.{name}": t for name, t in stack.state_dict().items()}
    if not model.spec.tied:
        # never used: the output layer of the `transformers` model computes the logits
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    with torch.no_grad():
        model.load_state_dict(state, assign=True)
    for name, layer in linears(model.model).items():
        if (weight := beside(stack.get_submodule(name))) is not None:
            layer.keep(weight)
    return model.eval().requires_grad_(False)


@torch.no_grad()
def unequal_reason(stack: Any) -> str | None:
    """Returns why a stack's steps cannot be native calls; None if one such step on random tokens gives equal
    results."""
    if not hasattr(stack, "layers") or not hasattr(stack, "norm"):
        return f"unknown class {type(stack).__name__}"
    modes = [(module, module.training) for module in stack.modules()]
    try:
        steps = stack.__dict__[STEPS] = Steps()
        stack.eval()
        decoder = decoder_of(stack)
        Lowered(decoder)  # raises HeadwayError if native steps do not support the decoder
        seed = torch.Generator().manual_seed(SEED)
        ids = torch.randint(stack.get_input_embeddings().num_embeddings, (2, SAMPLE + 1), generator=seed)
        step = {CACHE: DynamicCache(config=stack.config), "use_cache": True}
        type(stack).forward(stack, input_ids=ids[:, :-1], **step)
        steps.decoder, steps.weights = decoder, _weights(stack)
        step["input_ids"] = ids[:, -1:]
        if not _is_step(stack, step):
            return "steps of one token: its cache keeps less than whole rows"
        ours = stack_forward(stack, **step)
        whole = type(stack).forward(stack, input_ids=ids, use_cache=False).last_hidden_state[:, -1:]
        gap = relative(ours.last_hidden_state, whole)
    except HeadwayError as error:
        return f"steps of one token: {error}"
    finally:
        for module, mode in modes:
            module.training = mode
    if stack.dtype not in CLOSE or not gap <= CLOSE[stack.dtype]:
        return f"steps of one token differ from ours by {gap:.1g} of the largest number"
    return None
