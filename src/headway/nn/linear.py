"""The product with weights: `Linear`, with any form of weights, with adapters added to it, whole or shared by ranks.

Legend: I inputs, O outputs; M width of the states, V vocab.
"""

from collections.abc import Sequence
from typing import cast

from torch import Tensor, nn

from headway.nn.embeddings import TokenEmbedding
from headway.nn.kept import Keeps
from headway.nn.lora import LowRank, in_its_rows, merged_weight
from headway.nn.share import Share, part_of
from headway.nn.weights import Weight


class Linear(Keeps, nn.Linear):
    """The product x W^T (+ b), plus its active adapters: the only product with weights in the library, besides that of
    routers (`headway.nn.experts`).

        y = leave(W enter(x) + sum of adapters) + b        enter, leave: messages between the ranks that share the layer

    Variants are attributes, so that all can be combined:

    Attributes:
        kept: W, in one of the forms of `headway.nn.weights.WEIGHTS` (`Keeps`).
        adapters: by name; active: names of those that are added, in this order.
        share: the part of the layer that this rank has; None if it has all of it.
        embedding: the embedding whose table is W, if the layer is tied to one.
        is_output: whether its rows are those of a vocabulary.
    """

    embedding: TokenEmbedding | None

    def __init__(self, inputs: int, outputs: int, bias: bool = True) -> None:
        super().__init__(inputs, outputs, bias)
        self.adapters = nn.ModuleDict()
        self.active: tuple[str, ...] = ()
        self.share: Share | None = None
        self.is_output = False
        # Set past nn.Module, which would register the embedding as a child, and its parameters as this layer's.
        self.__dict__["embedding"] = None
        self._unmerged: Tensor | None = None  # W, while the adapters are merged into it

    @classmethod
    def output(
        cls, width: int, vocab: int, *, bias: bool = False, tied_to: TokenEmbedding | None = None
    ) -> "Linear":
        """Returns the layer x U^T (+ b), where U [V, M] is a matrix of its own, or the table of an embedding that it is
        tied to.

        (Press and Wolf 2017; Vaswani et al. 2017, section 3.4.) The table remains a parameter of the embedding
        alone: a tied layer without bias has no parameters."""
        layer = cls(width, vocab, bias)
        layer.is_output = True
        if tied_to is not None:
            layer.register_parameter("weight", None)
            layer.__dict__["embedding"] = tied_to
        return layer

    @property
    def kept(self) -> Weight:
        """W, in its current form."""
        return super().kept if self.embedding is None or self._form is not None else self.embedding.kept

    def keep(self, weight: Weight) -> None:
        """Replaces W by `weight`."""
        self.out_features, self.in_features = weight.shape
        super().keep(weight)

    @property
    def nbytes(self) -> int:
        """Bytes of W in its current form; 0 if it is the table of an embedding."""
        return 0 if self.embedding is not None and self._form is None else self.kept.nbytes

    def forward(self, x: Tensor) -> Tensor:
        """Computes the product and its adapters: [..., I] -> [..., O]."""
        if self.share is None and not self.active:  # the usual case: each Python call counts in small models
            return self.kept.product(x, self.bias)
        return self.leave(self.local(self.enter(x)))

    def enter(self, x: Tensor) -> Tensor:
        """Returns the input of `local` for x."""
        return x if self.share is None else self.share.enter(x)

    def local(self, x: Tensor) -> Tensor:
        """Computes the part of the layer that needs no communication with other ranks."""
        return self._adapted(x, self.kept, None)

    def leave(self, y: Tensor) -> Tensor:
        """Returns the output of the layer, given that of `local`."""
        if self.share is None:
            return y
        y = self.share.leave(y)
        return y if self.bias is None or not self.share.axis else y + self.bias

    def _adapted(self, x: Tensor, weight: Weight, product: Tensor | None) -> Tensor:
        """Computes `local`, with `product` = x W^T + `local_bias` if that is known already."""
        bias = self.local_bias
        y = weight.product(x, bias) if product is None else product
        adapters = self.beside
        plain = y if bias is None or not any(part.lora.magnitude for part in adapters.values()) else y - bias
        return sum((in_its_rows(name, part(x, weight, plain)) for name, part in adapters.items()), start=y)

    @property
    def beside(self) -> dict[str, LowRank]:
        """The adapters whose outputs are added to the layer's own, by name."""
        if not self.active or self.merged:
            return {}
        return {name: cast(LowRank, self.adapters[name]) for name in self.active}

    @property
    def local_bias(self) -> Tensor | None:
        """The bias that `local` adds: None if outputs are summed over ranks first."""
        return None if self.share is not None and self.share.axis else self.bias

    def divide(self, share: Share) -> None:
        """Keeps only a rank's part of the weight, the bias and the adapters, in place. Raises ConfigError if the
        ranks cannot divide the layer; the weight must have no `part_reason`."""
        rows = share.part(self.in_features if share.axis else self.out_features)
        if self.embedding is None:
            self.keep(self.kept.part(share.axis, rows))
        elif share.axis == 0:
            self.out_features = len(rows)
        if self.bias is not None and not share.axis:
            self.bias = part_of(self.bias, 0, rows)
        for name, adapter in list(self.adapters.items()):
            self.adapters[name] = cast(LowRank, adapter).part(share)
        self.share = share

    @property
    def merged(self) -> bool:
        """Whether the adapters are merged into the weight."""
        return self._unmerged is not None

    def merge(self) -> None:
        """Merges the active adapters into the weight; the original is kept, too."""
        if self._unmerged is None:
            self._unmerged = self.weight.data
            self.weight.data = merged_weight(self._unmerged, [self.adapters[name] for name in self.active])

    def unmerge(self) -> None:
        """Restores the original weight, bit for bit."""
        if self._unmerged is not None:
            self.weight.data, self._unmerged = self._unmerged, None

    def extra_repr(self) -> str:
        """Returns sizes, the form of the weight, and adapters."""
        tied = ", tied" if self.embedding is not None else ""
        form = "" if self._form is None else f", {self.kept.extra_repr()}"
        active = f", active={', '.join(self.active)}" if self.active else ""
        return f"{super().extra_repr()}{tied}{form}{active}{', merged' if self.merged else ''}"


def products(x: Tensor, layers: Sequence[Linear]) -> list[Tensor]:
    """Returns layer(x) for each layer. If ranks share the layers, x is communicated once; weights of the same form
    share work: int8 and int4 round x once."""
    hooked = any(layer._forward_hooks or layer._forward_pre_hooks for layer in layers)
    if hooked and layers[0].share is None:
        return [layer(x) for layer in layers]
    x = layers[0].enter(x)
    if hooked:
        return [layer.leave(layer.local(x)) for layer in layers]
    weights = [layer.kept for layer in layers]
    outputs = weights[0].side_by_side(x, weights, [layer.local_bias for layer in layers])
    if not any(layer.active or layer.share for layer in layers):
        return outputs
    return [
        layer.leave(layer._adapted(x, weight, product))
        for layer, weight, product in zip(layers, weights, outputs, strict=True)
    ]


def linears(model: nn.Module) -> dict[str, Linear]:
    """Returns every `Linear` of a model by its name."""
    return {name: m for name, m in model.named_modules() if isinstance(m, Linear)}
