"""What may be given as a prompt, as ids."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from headway.api.pretrained import Pretrained
from headway.errors import DataError
from headway.text import Tokenizer


def prompt_ids(model: Pretrained[Any, Tokenizer], prompt: Any, special: bool) -> tuple[list[list[int]], bool]:
    """The prompts as ids, and whether it was one."""
    if prompt is None:
        raise DataError("the prompt is None; give a text, token ids, or a list of either")
    if isinstance(prompt, Tensor):
        if prompt.dim() not in (1, 2) or prompt.is_floating_point():
            raise DataError(f"ids are an integer tensor [T] or [B, T], got {prompt.dtype} {[*prompt.shape]}")
        ids, one = prompt.tolist(), prompt.dim() == 1
        return ([ids] if one else ids), one
    if isinstance(prompt, str):
        return [model.need_tokenizer().encode(prompt, eos=False, special=special)], True
    if not isinstance(prompt, Iterable) or isinstance(prompt, bytes | Mapping):
        raise DataError(
            f"a prompt is a text, token ids, or a list of either; got {prompt!r} of type {type(prompt).__name__}"
        )
    prompts = [one.tolist() if hasattr(one, "tolist") else one for one in prompt]
    if prompts and isinstance(prompts[0], str):
        return model.need_tokenizer().encode_batch(prompts, eos=False, special=special), False
    if prompts and isinstance(prompts[0], int):
        return [prompts], True
    if any(isinstance(p, Mapping) for p in prompts):
        raise DataError("these are messages of a conversation, not prompts; use chat(messages)")
    return prompts, False
