"""headway's attention inside `transformers`, chosen by one string:

    model = AutoModelForCausalLM.from_pretrained(ID, attn_implementation="headway")

Importing the package registers two functions under the name "headway": `attention`, which a layer calls, and `seen`,
which `transformers` calls to build a mask. `seen` converts the mask function that the model requests back into a
`Pattern` and describes the slots as `Tokens`; no tensor over (query, key) pairs is ever built. The indices of the
tokens are slot numbers, so that a window means what it means in `transformers`, even with padding inside a row.

BackendError is raised for what is not supported: masks over pairs, attention weights as output, masks made by other
functions (raised by the layers that use them: some models make masks that no layer uses), unknown arguments."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.utils.output_capturing import _active_collector

from headway.attention import attend
from headway.errors import BackendError
from headway.integrations.transformers.modules import passed
from headway.patterns import Causal, Chunk, Full, Pattern, Window
from headway.scores import SoftCap
from headway.tokens import Tokens

NAME = "headway"

# Arguments that models pass along and that do not affect attention here: the mask was already made from them, or they
# do not concern attention at all. Any other argument raises BackendError.
SAID_ELSEWHERE = frozenset(
    {
        "position_ids",
        "cache_position",
        "use_cache",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        "return_loss",
        "deterministic",
        "interpolate_pos_encoding",
        "logits_to_keep",
        "labels",
    }
)


def cannot(what: str, instead: str = 'use attn_implementation="sdpa" for this model') -> BackendError:
    """Returns the error for something that this integration does not support."""
    return BackendError(f'attn_implementation="{NAME}": {what}; {instead}')


class Seen(Tensor):
    """Stands in for a mask [B, 1, T, S]: it has the mask's shape, holds a pattern and tokens, and has no values to
    read.

    It is a tensor because `transformers` passes a ready mask on only if it is one. If a model slices it or adds to it,
    it means something that the pattern does not express, so that raises BackendError."""

    pattern: Pattern
    q_tokens: Tokens
    k_tokens: Tokens
    error: BackendError | None
    """Why no pattern expresses this mask; raised by the layer that uses it, if one does."""

    @staticmethod
    def of(
        batch: int, pattern: Pattern, q_tokens: Tokens, k_tokens: Tokens, error: BackendError | None = None
    ) -> "Seen":
        """Returns the stand-in for the mask of `batch` rows. It takes one byte of memory, expanded to the shape."""
        shape = (batch, 1, q_tokens.count, k_tokens.count)
        byte = torch.zeros(1, dtype=torch.bool, device=q_tokens.device)
        mask: Seen = torch.Tensor._make_subclass(Seen, byte.expand(shape))
        mask.pattern, mask.q_tokens, mask.k_tokens, mask.error = pattern, q_tokens, k_tokens, error
        return mask

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        if name in ("__get__", "dim", "size", "stride", "numel", "get_device"):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if name == "contiguous":
            return args[0]
        if name == "to":
            mask, arguments = args[0], [*args[1:], *(kwargs or {}).values()]
            for device in (item for item in arguments if isinstance(item, torch.device | str)):
                q_tokens, k_tokens = mask.q_tokens.to(device), mask.k_tokens.to(device)
                return Seen.of(mask.shape[0], mask.pattern, q_tokens, k_tokens, mask.error)
        raise cannot(f"the model applies `{name}` to its attention mask, which has no values here")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Seen({self.pattern}, queries={self.q_tokens.count}, keys={self.k_tokens.count})"


def seen(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **hints: Any,
) -> Seen:
    """Returns which keys each query sees, as a pattern; registered as the mask function of `attention`.

    Query slots are q_offset .. q_offset + q_length - 1; key slots are kv_offset .. kv_offset + kv_length - 1 (a rolling
    cache has dropped those before). `attention_mask` bool [B, slots so far] is False on padding; slots beyond it are
    empty. `hints` are about building a dense mask, and are ignored."""
    try:
        (pattern, document, position), error = declared(mask_function), None
    except BackendError as refused:
        pattern, document, position, error = Full(), None, None, refused
    if document is not None and position is not None:
        packed = Tokens(position.expand(batch_size, -1).to(device), document.to(device))
        return Seen.of(batch_size, pattern, packed, packed)
    begin = int(q_offset)
    q_tokens = Tokens.range(q_length, start=begin, device=device)
    k_tokens = Tokens.range(kv_length, start=int(kv_offset), device=device)
    if attention_mask is not None:
        real = attention_mask[:, kv_offset : kv_offset + kv_length].to(device=device, dtype=torch.bool)
        # Slots of a static cache after the last query need no mask: a causal pattern hides them anyway.
        later = pattern.is_causal and kv_offset + real.shape[1] >= begin + q_length
        if not bool(real.all()) or not (later or real.shape[1] == kv_length):
            real = pad(real, (0, kv_length - real.shape[1]))
            k_tokens = Tokens(torch.where(real, k_tokens.index, -1))
    return Seen.of(batch_size, pattern, q_tokens, k_tokens, error)


def declared(mask_function: Callable[..., Any] | None) -> tuple[Pattern, Tensor | None, Tensor | None]:
    """Returns the pattern of a mask function of `transformers`; if it packs documents, also documents and positions [B,
    N].

    The functions are closures made by the factories of `transformers.masking_utils`; each is recognized by its factory
    and read from its closure variables. Raises BackendError for any other function."""
    causal, last, parts = False, [], list[Pattern]()
    document: Tensor | None = None
    position: Tensor | None = None
    for factory, variables in leaves(mask_function):
        if factory == "causal_mask_function":
            causal = True
        elif factory == "sliding_window_overlay":
            if variables["sliding_window"] < 1:
                raise cannot("the model's mask is a window of 0 tokens, in which no query sees any key")
            last.append(Window.last(variables["sliding_window"]))
        elif factory == "sliding_window_bidirectional_overlay":
            parts.append(Window.around(variables["sliding_window"]))
        elif factory == "chunked_overlay":
            if bool(variables["left_padding"].any()):
                raise cannot(
                    "chunked attention with padding on the left is not supported", "pad on the right"
                )
            parts.append(Chunk(variables["chunk_size"]))
        elif factory == "packed_sequence_mask_function":
            document = variables["packed_sequence_mask"]
        elif factory == "remap_positions_for_packed_sequence":
            position = variables["position_ids"]
        elif factory != "bidirectional_mask_function":
            raise cannot(f"the model's mask is made by `{factory}`, for which there is no pattern")
    if last and not causal:
        raise cannot("the model's mask is a sliding window that is not causal: all later keys are seen")
    pattern: Pattern = Causal() if causal and not last else Full()
    for part in (*last, *parts):
        pattern = part if pattern == Full() else pattern & part
    return pattern, document, position


def leaves(function: Callable[..., Any] | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the factories whose masks must all allow a pair, each with the variables of its closure."""
    if function is None:
        yield "causal_mask_function", {}
        return
    names = function.__code__.co_freevars if hasattr(function, "__code__") else ()
    cells = getattr(function, "__closure__", None) or ()
    variables = dict(zip(names, (cell.cell_contents for cell in cells), strict=True))
    module, name = getattr(function, "__module__", "?"), getattr(function, "__qualname__", repr(function))
    factory = name.split(".", 1)[0] if module == "transformers.masking_utils" else f"{module}.{name}"
    if factory == "and_masks":
        for part in variables["mask_functions"]:
            yield from leaves(part)
        return
    yield factory, variables
    if factory == "remap_positions_for_packed_sequence":
        yield from leaves(variables["mask_function"])


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Returns one layer's attention: query [B, H, T, D], key [B, K, S, D], value [B, K, S, Dv], s_aux [H] -> [B, T, H,
    Dv].

    Raises BackendError for what is not supported."""
    _refuse(others)
    if isinstance(attention_mask, Seen):
        mask = attention_mask
        if mask.error is not None:
            raise mask.error
        if is_causal and not mask.pattern.is_causal:
            raise cannot(f"the layer has is_causal=True, but its mask is {mask.pattern}")
        if is_causal is False and mask.pattern.is_causal and _is_contradicted(module):
            raise cannot(
                f"is_causal=False was given to a causal {type(module).__name__}, but its mask is {mask.pattern}",
                "set is_causal = False in the model's config, from which its mask is made",
            )
        if sliding_window is not None and mask.pattern in (Causal(), Full()):
            raise cannot(f"the layer has sliding_window={sliding_window}, but its mask is {mask.pattern}")
    elif attention_mask is None:
        mask = _said_by_the_layer(module, query, key, is_causal, sliding_window)
    else:
        raise cannot(
            f"an attention_mask of shape {tuple(attention_mask.shape)} is not supported",
            "give the 2-dimensional attention_mask (1 token, 0 padding), or position_ids that start again at "
            'each packed document, or use attn_implementation="sdpa"',
        )
    if (mask.q_tokens.count, mask.k_tokens.count) != (query.shape[2], key.shape[2]):
        raise cannot(
            f"the mask is for {mask.q_tokens.count} queries and {mask.k_tokens.count} keys, but the layer has "
            f"{query.shape[2]} and {key.shape[2]}: the model or its cache changes them after the mask is made"
        )
    out = attend(
        query,
        key,
        value,
        mask.pattern,
        q_tokens=mask.q_tokens,
        k_tokens=mask.k_tokens,
        score=() if softcap is None else (SoftCap(softcap),),
        sink_logit=s_aux,
        scale=scaling,
        dropout=dropout,
    )
    return out.transpose(1, 2).contiguous(), None


def _is_contradicted(module: torch.nn.Module) -> bool:
    """Returns whether is_causal=False comes from the model's caller and contradicts a causal layer. If the layer's own
    code passes it (Moonshine's does when there is a mask), the mask decides."""
    return getattr(module, "is_causal", False) and "is_causal" not in passed(type(module).forward)


def _said_by_the_layer(
    module: torch.nn.Module, query: Tensor, key: Tensor, is_causal: bool | None, sliding_window: int | None
) -> Seen:
    """Returns the mask of a layer that passes none, from the layer's own attributes, without guessing."""
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", None)
    name, queries, keys = type(module).__name__, query.shape[2], key.shape[2]
    if causal is None:
        raise cannot(f"{name} has neither a mask nor is_causal, so its attention pattern is unknown")
    if causal and queries != keys:
        raise cannot(
            f"{name} is causal and passes no mask for {queries} queries over {keys} keys, so the positions of the "
            "queries are unknown"
        )
    if sliding_window is not None and not causal:
        raise cannot(f"{name} is not causal and passes sliding_window={sliding_window} without a mask")
    pattern: Pattern = Full() if not causal else Window.last(sliding_window) if sliding_window else Causal()
    q_tokens = Tokens.range(queries, device=query.device)
    return Seen.of(query.shape[0], pattern, q_tokens, Tokens.range(keys, device=query.device))


def _refuse(others: dict[str, Any]) -> None:
    used = [name for name, value in others.items() if not (value is None or value is False)]
    # some models collect outputs without passing the request on to their layers
    collected = _active_collector.get() or ()  # type: ignore[no-untyped-call]
    if "output_attentions" in used or any("attentions" in name for name in collected):
        raise cannot(
            "output_attentions=True is not supported, since attention weights are never materialized",
            'use attn_implementation="eager", or headway.attention_weights on one layer',
        )
    unknown = sorted(set(used) - SAID_ELSEWHERE)
    if unknown:
        raise cannot(f"the model passes {', '.join(unknown)}, which is unknown and would be ignored")


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, seen)
