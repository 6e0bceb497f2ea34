"""`ModelSpec`: one frozen value that says all of a model but its weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from headway.attention.linear_attention import LinearAttentionSpec
from headway.errors import ConfigError, did_you_mean
from headway.models.arithmetic import Arithmetic
from headway.models.build import build
from headway.models.decoder import Decoder
from headway.models.families import FAMILIES
from headway.models.head import Head
from headway.models.shape import expand_patterns
from headway.patterns import Causal, Full, Pattern
from headway.positions import Learned, Rotary


@dataclass(frozen=True, kw_only=True)
class ModelSpec(Arithmetic):
    """A model, declared: fields in `Shape`, arithmetic in `Arithmetic`; `build` gives the module of a decoder, and
    `headway.models.build` that of any spec.

    `ModelSpec.of("qwen3", ...)` fills in what is usual in a family, `ModelSpec.of_depth(6, vocab)` is one dial
    for models of one's own, and `headway.models.catalog` has the published sizes.
    """

    @staticmethod
    def of(
        family: str,
        *,
        patterns: Pattern | Sequence[Pattern] | None = None,
        **fields: Any,
    ) -> ModelSpec:
        """A spec with the usual values of `family` for whatever is not given.

        kv_heads = heads, head_dim = width / heads, patterns = Causal(), positions = Rotary(the family's theta,
        pairing="halves"), unless the family's own defaults say otherwise. Raises ConfigError for an unknown family or
        field.
        """
        if family not in FAMILIES:
            raise ConfigError(
                f"ModelSpec: there is no family {family!r}{did_you_mean(family, FAMILIES)}; "
                f"there are {', '.join(FAMILIES)}"
            )
        known = set(ModelSpec.__dataclass_fields__)
        for name in fields:
            if name not in known:
                raise ConfigError(f"ModelSpec has no field {name!r}{did_you_mean(name, known)}")
        needed = [n for n in ("vocab", "width", "layers", "heads", "hidden") if n not in fields]
        if needed:
            raise ConfigError(f"ModelSpec.of({family!r}, ...): {', '.join(needed)} must be given")
        given = {"patterns": Causal(), **FAMILIES[family].defaults, **fields}
        seen = given.pop("patterns") if patterns is None else patterns
        given.pop("patterns", None)
        given = {**FAMILIES[family].derive(given), **given}
        given.setdefault("kv_heads", given["heads"])
        given.setdefault("positions", Rotary(FAMILIES[family].theta, pairing="halves"))
        if "head_dim" not in given:
            if given["heads"] < 1 or given["width"] % given["heads"]:
                raise ConfigError(
                    f"ModelSpec: width {given['width']} is not a multiple of {given['heads']} heads; "
                    "give head_dim"
                )
            given["head_dim"] = given["width"] // given["heads"]
        causal = given.get("causal", True)
        return ModelSpec(family=family, patterns=expand_patterns(seen, given["layers"], causal), **given)

    @staticmethod
    def of_pair(family: str, *, encoder: Mapping[str, Any] | None = None, **fields: Any) -> ModelSpec:
        """An encoder-decoder of `family` with one vocab: `of` for both stacks, and one embedding for both.

        `fields` are those of both, as in `of`; `encoder` those that are other in the encoder, whose own vocab means an
        embedding of its own (so does shared_embedding=False). (Vaswani et al. 2017, sections 3.1 and 3.4.)
        """
        sees = {
            "causal": False,
            "patterns": Full(),
            "head": Head("states"),
            "tied": False,
            "output_bias": False,
        }
        other = {"shared_embedding", "logit_scale"}
        first = ModelSpec.of(
            family, **{k: v for k, v in fields.items() if k not in other} | sees | dict(encoder or {})
        )
        shared = fields.pop("shared_embedding", first.vocab == fields["vocab"])
        return ModelSpec.of(family, encoder=first, shared_embedding=shared, **fields)

    @staticmethod
    def of_depth(
        depth: int,
        vocab: int,
        *,
        context: int = 1024,
        patterns: Pattern | Sequence[Pattern] = Causal(),  # noqa: B008  (a frozen value)
        group: int | None = None,
        family: str = "llama",
        **fields: Any,
    ) -> ModelSpec:
        """One dial: a model of `depth` layers whose other sizes follow.

            layers = depth        width = 64 depth        heads = depth, of 64 dims
            kv_heads = heads / group        hidden = 8/3 width, rounded up to a multiple of 64; 4 width without a gate

        Embedding and output layer are tied; a table of positions has `context` of them. Parameters grow with depth^3
        (beside the embedding).

        Args:
            vocab: rows of the embedding.
            context: trained context, in tokens.
            patterns: as in `ModelSpec`.
            group: query heads per kv head, unless given: as the family has it, else 2 where depth is even and 1
                elsewhere.
            family: what it is a case of ("ministral", "qwen2" and "qwen3" can be saved with windows by layer).
            fields: other fields of `ModelSpec`, which take precedence.
        """
        if depth < 1:
            raise ConfigError(f"ModelSpec.of_depth: depth counts layers, 1 or more, got {depth}")
        kind = FAMILIES.get(family, FAMILIES["llama"])  # an unknown one is refused by `of`
        if group is None:
            group = depth // kind.kv_heads(depth, 1 if depth % 2 else 2)
        if group < 1 or depth % group:
            raise ConfigError(
                f"ModelSpec.of_depth: {depth} heads cannot be shared {group} to a kv head; "
                f"group must divide {depth}"
            )
        width = 64 * depth
        usual: dict[str, Any] = {
            "width": width,
            "layers": depth,
            "heads": depth,
            "kv_heads": depth // group,
            "head_dim": 64,
            "hidden": kind.hidden(width),
            "tied": True,
            "trained_context": context,
        }
        if isinstance(table := kind.defaults.get("positions"), Learned):
            usual["positions"] = replace(table, size=context)
        return ModelSpec.of(family, patterns=patterns, vocab=vocab, **{**usual, **fields})

    def with_patterns(self, patterns: Pattern | Sequence[Pattern]) -> ModelSpec:
        """The same model seeing through other patterns; its weights fit unchanged."""
        return replace(self, patterns=expand_patterns(patterns, self.layers, self.causal))

    def with_linear(self, linear: LinearAttentionSpec) -> ModelSpec:
        """The same model with linear attention in every layer; its weights fit unchanged."""
        seen = Causal() if self.causal else Full()
        return replace(
            self, linear=linear, attention_dropout=0.0, attention_scale=None, patterns=(seen,) * self.layers
        )

    def with_head(self, head: Head) -> ModelSpec:
        """The same encoder for another purpose. Where the head has no matrix over the vocab there is nothing to
        tie, and no bias; "masked-lm" ties, as in BERT."""
        vocab = head.needs_vocab
        return replace(self, head=head, tied=vocab, output_bias=vocab)

    def build(
        self,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        seed: int | None = None,
        backend: str = "auto",
    ) -> Decoder:
        """A decoder with fresh weights (see `initialize_`), in training mode; `headway.models.build` makes any model.

        Args:
            device: "meta" gives shapes without memory or weights.
            dtype: of all parameters; torch's default unless given.
            seed: equal seeds give equal weights on every device (in bfloat16: their rounding); None draws one.
            backend: of attention, in every layer.
        Raises ConfigError when this is not the spec of a decoder alone.
        """
        model = build(self, device, dtype, seed, backend)
        if not isinstance(model, Decoder):
            raise ConfigError(
                f"ModelSpec.build makes decoders, and this spec is of an {type(model).__name__}; "
                "call headway.models.build(spec)"
            )
        return model
