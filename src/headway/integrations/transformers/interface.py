"""headway's attention inside `transformers`: change one string, keep the stack.

    model = AutoModelForCausalLM.from_pretrained(ID, attn_implementation="headway")

Importing the package registers two functions under the name "headway": `attention`, which a layer calls,
and `seen`, which stands where `transformers` would build a mask. `seen` reads the mask function that the
model asks for back into a `Pattern` and describes the slots as `Tokens`; no tensor over (query, key) pairs
is ever built. The indices of the tokens are slot numbers, so a window means what it means in
`transformers`, also where padding stands inside a row.

What cannot be honoured raises `BackendError`: masks over pairs, attention weights as output, masks made by
other functions (in the layers that use them: some models make masks that no layer uses), arguments that are not
known here.
"""

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

# What models pass along that does not say what is seen: the mask was made from it already, or it is not for
# attention at all. Anything else raises.
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
    """The error for what this integration is asked and cannot give."""
    return BackendError(f'attn_implementation="{NAME}": {what}; {instead}')


class Seen(Tensor):
    """Stands in for a mask [B, 1, T, S]: has its shape, holds as values what is seen, refuses to be read.

    A tensor, because `transformers` passes a ready mask on only when it is one. A model that slices it or
    adds to it means something that is not declared here, so that raises.
    """

    pattern: Pattern
    q_tokens: Tokens
    k_tokens: Tokens
    error: BackendError | None
    """Why no pattern is this mask: for the layer that uses it, if one does."""

    @staticmethod
    def of(
        batch: int, pattern: Pattern, q_tokens: Tokens, k_tokens: Tokens, error: BackendError | None = None
    ) -> "Seen":
        """The stand-in for the mask of `batch` rows. One byte stands behind the shape."""
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
        raise cannot(f"the model applies `{name}` to its attention mask, and there is no mask to read")

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
    """The keys that each query sees, declared instead of drawn: the mask function beside `attention`.

    Query slots are q_offset .. q_offset + q_length - 1; key slots are kv_offset .. kv_offset + kv_length - 1
    (a rolling cache has dropped those before). `attention_mask` bool [B, slots so far] is False on padding;
    slots beyond it are empty. `hints` say how the caller would have a dense mask built: there is none.
    """
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
        # Slots of a static cache that lie after the last query: a causal pattern hides them anyway.
        later = pattern.is_causal and kv_offset + real.shape[1] >= begin + q_length
        if not bool(real.all()) or not (later or real.shape[1] == kv_length):
            real = pad(real, (0, kv_length - real.shape[1]))
            k_tokens = Tokens(torch.where(real, k_tokens.index, -1))
    return Seen.of(batch_size, pattern, q_tokens, k_tokens, error)


def declared(mask_function: Callable[..., Any] | None) -> tuple[Pattern, Tensor | None, Tensor | None]:
    """The pattern of a mask function of `transformers`; when it packs, also documents and positions [B, N].

    The functions are closures made by the factories of `transformers.masking_utils`; each is recognised by
    its factory and read by its variables. Any other function raises.
    """
    causal, last, others = False, [], list[Pattern]()
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
            others.append(Window.around(variables["sliding_window"]))
        elif factory == "chunked_overlay":
            if bool(variables["left_padding"].any()):
                raise cannot("the model's chunks begin behind padding on the left", "pad on the right")
            others.append(Chunk(variables["chunk_size"]))
        elif factory == "packed_sequence_mask_function":
            document = variables["packed_sequence_mask"]
        elif factory == "remap_positions_for_packed_sequence":
            position = variables["position_ids"]
        elif factory != "bidirectional_mask_function":
            raise cannot(f"the model's mask is made by `{factory}`, which is not a pattern known here")
    if last and not causal:
        raise cannot("the model's mask is a window behind each query with everything ahead of it seen")
    pattern: Pattern = Causal() if causal and not last else Full()
    for part in (*last, *others):
        pattern = part if pattern == Full() else pattern & part
    return pattern, document, position


def leaves(function: Callable[..., Any] | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """The factories whose masks must all allow a pair, each with the variables of its closure."""
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
    """One layer's attention: query [B, H, T, D], key [B, K, S, D], value [B, K, S, Dv], s_aux [H] -> [B, T, H, Dv].

    Raises `BackendError` for what is asked and cannot be given.
    """
    _refuse(others)
    if isinstance(attention_mask, Seen):
        mask = attention_mask
        if mask.error is not None:
            raise mask.error
        if is_causal and not mask.pattern.is_causal:
            raise cannot(f"the layer says is_causal=True, but its mask was declared as {mask.pattern}")
        if is_causal is False and mask.pattern.is_causal and _is_contradicted(module):
            raise cannot(
                f"is_causal=False was given to a causal {type(module).__name__}, but its mask was declared as "
                f"{mask.pattern}",
                "set is_causal = False in the model's config, from which its mask is made",
            )
        if sliding_window is not None and mask.pattern in (Causal(), Full()):
            raise cannot(
                f"the layer says sliding_window={sliding_window}, but its mask was declared as {mask.pattern}"
            )
    elif attention_mask is None:
        mask = _said_by_the_layer(module, query, key, is_causal, sliding_window)
    else:
        raise cannot(
            f"a mask of shape {tuple(attention_mask.shape)} over pairs of tokens was given",
            "give the 2-dimensional attention_mask (1 token, 0 padding), or position_ids that start again at "
            'each packed document, or use attn_implementation="sdpa"',
        )
    if (mask.q_tokens.count, mask.k_tokens.count) != (query.shape[2], key.shape[2]):
        raise cannot(
            f"{mask.q_tokens.count} queries and {mask.k_tokens.count} keys were declared, but the layer has "
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
    """Whether is_causal=False comes from who calls the model, against a layer that is causal. A layer whose own code
    says so (Moonshine's, where there is a mask) leaves it to its mask."""
    return getattr(module, "is_causal", False) and "is_causal" not in passed(type(module).forward)


def _said_by_the_layer(
    module: torch.nn.Module, query: Tensor, key: Tensor, is_causal: bool | None, sliding_window: int | None
) -> Seen:
    """The mask of a layer that gave none, by what the layer says of itself, never by a guess."""
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", None)
    name, queries, keys = type(module).__name__, query.shape[2], key.shape[2]
    if causal is None:
        raise cannot(f"{name} gives neither a mask nor `is_causal`, so what its tokens see is not known")
    if causal and queries != keys:
        raise cannot(
            f"{name} is causal and gives no mask for {queries} queries over {keys} keys, so where the "
            "queries stand is not known"
        )
    if sliding_window is not None and not causal:
        raise cannot(f"{name} has a window of {sliding_window} on unsaid sides, and gives no mask")
    pattern: Pattern = Full() if not causal else Window.last(sliding_window) if sliding_window else Causal()
    q_tokens = Tokens.range(queries, device=query.device)
    return Seen.of(query.shape[0], pattern, q_tokens, Tokens.range(keys, device=query.device))


def _refuse(others: dict[str, Any]) -> None:
    used = [name for name, value in others.items() if not (value is None or value is False)]
    # requests to models that do not pass them on to their layers
    collected = _active_collector.get() or ()  # type: ignore[no-untyped-call]
    if "output_attentions" in used or any("attentions" in name for name in collected):
        raise cannot(
            "output_attentions=True was asked for, and the weights are never built",
            'use attn_implementation="eager", or headway.attention_weights on one layer',
        )
    unknown = sorted(set(used) - SAID_ELSEWHERE)
    if unknown:
        raise cannot(f"the model passes {', '.join(unknown)}, which is not known here and would be ignored")


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, seen)
