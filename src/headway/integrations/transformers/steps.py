"""Steps of one token as one native call, inside a model of `transformers`.

The stack's forward is asked for one more token of each row; where its cache holds whole rows and its layers are those
of a `headway.models.Decoder`, a decoder on the same weights takes the step (`headway.models.decode_step`), and the
cache shows what it keeps. Every other call is computed as before.

Legend: B rows, M width, K kv heads, D per head.
"""

import json
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer
from transformers.modeling_outputs import BaseModelOutputWithPast

from headway.cache import PAGE, CacheSpec, PagedCache, PagedLayer, PageTable
from headway.cache.paged_step import PagedStep
from headway.checkpoints.hf.config import spec_from_config, tensor_names
from headway.checkpoints.hf.layouts import OWN_NAMES
from headway.errors import HeadwayError
from headway.integrations.transformers.caches import GrowingLayer, growing
from headway.integrations.transformers.modules import SEED, relative
from headway.integrations.transformers.products import beside
from headway.models import Decoder, blank
from headway.models.decode_step import DecodeStep
from headway.models.lowering import Lowered
from headway.nn import linears

STEPS = "_headway_steps"
CLOSE = {torch.float32: 1e-4, torch.bfloat16: 0.1}
"""How far two computations of a whole stack may differ, over the largest number, before one of them is another's: the
roundings of some tens of layers."""
GIVEN = ("input_ids", "attention_mask", "position_ids", "past_key_values", "inputs_embeds", "use_cache")
"""The arguments of a stack that a step may have, in their order."""
SAMPLE = 5
"""Tokens before the step that is compared."""


class Steps:
    """The decoder on a stack's weights, and what goes on with each cache. A copy of the model starts without."""

    def __init__(self) -> None:
        self.decoder: Decoder | None = None
        self.weights: tuple[tuple[str, int], ...] = ()
        self.live: WeakKeyDictionary[Cache, Live] = WeakKeyDictionary()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Steps":
        return Steps()

    def __reduce__(self) -> tuple[Any, ...]:
        return Steps, ()


class Live:
    """A cache of transformers, and ours of the same tokens in the same memory.

    That is [B, K, C, D] for C tokens, a multiple of 64, which is also pages: slot s of row b is number b K C + s where
    a head is C D numbers from the next. For B = 2, K = 3, C = 128 row 1 begins with page 6."""

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
        """Embeddings [B, 1, M] of the next token of each row; the last states. The cache then has that token, too."""
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
        """Whether nobody has changed the cache since."""
        return all(a is b.keys for a, b in zip(self.shown, cache.layers, strict=True))


def _as_slots(room: Tensor) -> Tensor:
    """Memory [B, K, C, D] as one row of slots, [1, K, (B - 1) K C + C, D]: see `Live`."""
    batch, heads, capacity, size = room.shape
    slots = (batch - 1) * heads * capacity + capacity
    return room.as_strided((1, heads, slots, size), (0, capacity * size, size, 1))


def stack_forward(self: Any, *args: Any, **named: Any) -> Any:
    """A `LlamaModel` and its like: a step by the kernels where it can be one."""
    given = {**dict.fromkeys(GIVEN), **dict(zip(GIVEN, args, strict=False)), **named}
    x, cache = given["inputs_embeds"], given["past_key_values"]
    if _is_step(self, given) and (live := _live(self, cache)) is not None:
        states = live.read(self.get_input_embeddings()(given["input_ids"]) if x is None else x, cache)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(states), past_key_values=cache)
    return type(self).forward(self, *args, **named)


def _is_step(self: Any, given: Mapping[str, Any]) -> bool:
    """Whether a call is for the next token of rows without padding, and for nothing else."""
    ids, mask, positions, cache, x, use_cache = (given.get(name) for name in GIVEN)
    rows = ids if x is None else x
    if type(cache) is not DynamicCache or use_cache is False or self.training or torch.is_grad_enabled():
        return False
    if (ids is None) == (x is None) or rows is None or rows.shape[1] != 1 or not rows.is_cpu:
        return False
    if any(given[name] not in (None, False) for name in given.keys() - {*GIVEN, "return_dict"}):
        return False
    if given.get("return_dict") is False or torch.is_autocast_enabled("cpu") or cache.offloading:
        return False
    layers: list[Any] = cache.layers
    if any(type(one) not in (DynamicLayer, GrowingLayer) for one in layers):
        return False
    past = cache.get_seq_length()
    if not past or len(layers) != len(self.layers) or len(layers[0].keys) != len(rows):
        return False
    if positions is not None and not bool((positions == past).all()):
        return False
    if mask is None:
        return True
    return isinstance(mask, Tensor) and mask.shape == (len(rows), past + 1) and bool(mask.all())


def _live(self: Any, cache: Any) -> Live | None:
    """What takes the steps of this cache; None where the model is no longer what it was."""
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
    """Where its weights lie, by their names."""
    return tuple((name, p.data_ptr()) for name, p in stack.named_parameters())


def decoder_of(stack: Any) -> Decoder:
    """A decoder whose blocks have the very weights of a stack. Raises HeadwayError where none computes the same."""
    config = json.loads(stack.config.to_json_string(use_diff=True))
    if tensor_names(config) is not OWN_NAMES:
        raise HeadwayError(f"{type(stack).__name__} has other names")
    with torch.device("meta"):
        model = blank(spec_from_config(config))
    assert isinstance(model, Decoder)
    state = {f"model.{name}": t for name, t in stack.state_dict().items()}
    if not model.spec.tied:
        # not multiplied with: the model has its own
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    with torch.no_grad():
        model.load_state_dict(state, assign=True)
    for name, layer in linears(model.model).items():
        if (weight := beside(stack.get_submodule(name))) is not None:
            layer.keep(weight)
    return model.eval().requires_grad_(False)


@torch.no_grad()
def unequal_reason(stack: Any) -> str | None:
    """Why a stack's steps cannot be native calls; None if they can, as shown by one on random tokens."""
    if not hasattr(stack, "layers") or not hasattr(stack, "norm"):
        return f"unknown class {type(stack).__name__}"
    modes = [(module, module.training) for module in stack.modules()]
    try:
        steps = stack.__dict__[STEPS] = Steps()
        stack.eval()
        decoder = decoder_of(stack)
        Lowered(decoder)  # raises the reason where there is none
        seed = torch.Generator().manual_seed(SEED)
        ids = torch.randint(stack.get_input_embeddings().num_embeddings, (2, SAMPLE + 1), generator=seed)
        step = {"past_key_values": DynamicCache(config=stack.config), "use_cache": True}
        type(stack).forward(stack, input_ids=ids[:, :-1], **step)
        steps.decoder, steps.weights = decoder, _weights(stack)
        step["input_ids"] = ids[:, -1:]
        if not _is_step(stack, step):
            return "steps of one token: its cache keeps less than whole rows"
        ours = stack_forward(stack, **step)
        whole = type(stack).forward(stack, input_ids=ids, use_cache=False).last_hidden_state[:, -1:]
        found = relative(ours.last_hidden_state, whole)
    except HeadwayError as error:
        return f"steps of one token: {error}"
    finally:
        for module, mode in modes:
            module.training = mode
    if stack.dtype not in CLOSE or not found <= CLOSE[stack.dtype]:
        return f"steps of one token differ from ours by {found:.1g} of the largest number"
    return None
