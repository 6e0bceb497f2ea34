"""The Transformer of 2017 (Vaswani et al.): rows 15, 19, 20, 21 and 27."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headway.models import EncoderDecoder, ModelSpec, build, catalog, cost
from headway.nn import Block
from headway.tokens import Tokens

SIZE: dict[str, Any] = {"vocab": 50, "width": 32, "layers": 6, "heads": 4, "hidden": 48, "dropout": 0.0}
SOURCE = torch.randint(0, 50, (2, 9), generator=torch.Generator().manual_seed(1))
TARGET = torch.randint(0, 50, (2, 7), generator=torch.Generator().manual_seed(2))


def made(dtype: torch.dtype = torch.float64, **fields: Any) -> EncoderDecoder:
    """Returns a model with random weights of standard deviation 0.3, gains and biases included."""
    spec = ModelSpec.of_pair("transformer", **{**SIZE, "tied": True, **fields})
    model = build(spec, seed=0, dtype=dtype).eval()
    assert isinstance(model, EncoderDecoder)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.3 + name.endswith("norm.weight"))
    return model


# -- row 19: the same function, written from the paper --------------------------------------------------------


class Reference:
    """The paper, equation by equation, one sentence pair at a time."""

    def __init__(self, model: EncoderDecoder, order: str = "post") -> None:
        self.w, self.spec, self.order = model.state_dict(), model.spec, order
        self.embedding = self.w["decoder.embed_tokens.weight"]

    def __call__(self, source: Tensor, target: Tensor) -> Tensor:
        assert self.spec.encoder is not None
        x, y = self.embed(source), self.embed(target)
        for i in range(self.spec.encoder.layers):
            x = self.layer(f"encoder.layers.{i}", x)
        memory = self.last(x, "encoder.norm")
        for i in range(self.spec.layers):
            y = self.layer(f"decoder.layers.{i}", y, memory)
        return self.last(y, "decoder.norm") @ self.embedding.T

    def layer(self, prefix: str, x: Tensor, memory: Tensor | None = None) -> Tensor:
        """Section 3.1: only the decoder has the second of the three sub-layers."""
        masked = memory is not None
        x = self.around(
            x, f"{prefix}.input_layernorm", lambda y: self.attend(f"{prefix}.self_attn", y, y, masked)
        )
        if memory is not None:
            across = f"{prefix}.cross_attn"
            x = self.around(
                x, f"{prefix}.cross_attention_layernorm", lambda y: self.attend(across, y, memory)
            )
        return self.around(x, f"{prefix}.post_attention_layernorm", lambda y: self.ffn(f"{prefix}.mlp", y))

    def embed(self, ids: Tensor) -> Tensor:
        """Section 3.4 and 3.5."""
        m = self.spec.width
        rows = [
            [
                (math.cos if j % 2 else math.sin)(
                    p / 10000 ** ((j - j % 2) / m)
                )  # E: sin at 2i, cos at 2i + 1
                for j in range(m)
            ]
            for p in range(len(ids))
        ]
        return self.embedding[ids] * math.sqrt(m) + torch.tensor(rows, dtype=self.embedding.dtype)

    def around(self, x: Tensor, norm: str, layer: Any) -> Tensor:
        """Section 3.1: LayerNorm(x + Sublayer(x)), or x + Sublayer(LayerNorm(x))."""
        if self.order == "post":
            return self.norm(x + layer(x), norm)
        return x + layer(self.norm(x, norm))

    def last(self, x: Tensor, name: str) -> Tensor:
        return self.norm(x, name) if f"{name}.weight" in self.w else x

    def norm(self, x: Tensor, name: str) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        deviation = (centred.square().mean(-1, keepdim=True) + self.spec.norm_eps).sqrt()
        return centred / deviation * self.w[f"{name}.weight"] + self.w[f"{name}.bias"]

    def attend(self, prefix: str, x: Tensor, memory: Tensor, masked: bool = False) -> Tensor:
        """Section 3.2: Concat(head_1, ...) W^O, head_i = softmax(Q_i K_i^T / sqrt(d_k)) V_i."""
        d, heads = self.spec.head_dim, []
        for h in range(self.spec.heads):
            q, k, v = (
                inp @ self.w[f"{prefix}.{name}_proj.weight"][h * d : (h + 1) * d].T
                for inp, name in ((x, "q"), (memory, "k"), (memory, "v"))
            )
            scores = q @ k.T / math.sqrt(d)
            if masked:
                scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -math.inf)
            heads.append(scores.softmax(-1) @ v)
        return torch.cat(heads, -1) @ self.w[f"{prefix}.o_proj.weight"].T

    def ffn(self, prefix: str, x: Tensor) -> Tensor:
        """Section 3.3: max(0, x W_1 + b_1) W_2 + b_2."""
        inner = (x @ self.w[f"{prefix}.up_proj.weight"].T + self.w[f"{prefix}.up_proj.bias"]).clamp_min(0)
        return inner @ self.w[f"{prefix}.down_proj.weight"].T + self.w[f"{prefix}.down_proj.bias"]


@pytest.mark.parametrize("order", ["post", "pre"])
@torch.no_grad()
def test_row_19_and_27_the_model_is_the_paper_with_either_order_of_the_norms(order: str) -> None:
    """Row 27: both orders have the same parameters, but for the norm behind the last layer."""
    model = made(order=order, final_norm=order == "pre")
    actual = model(SOURCE, TARGET)
    for row in range(2):
        expected = Reference(model, order)(SOURCE[row], TARGET[row])
        assert float((actual[row] - expected).abs().max()) < 1e-12 * float(expected.abs().max())
    other_order = Reference(model, "pre" if order == "post" else "post")(SOURCE[0], TARGET[0])
    assert float((actual[0] - other_order).abs().max()) > 0.1 * float(other_order.abs().max())


@pytest.mark.parametrize(
    ("name", "width", "hidden", "heads", "dropout", "count"),
    [
        ("transformer-base", 512, 2048, 8, 0.1, 63_045_632),
        ("transformer-big", 1024, 4096, 16, 0.3, 214_171_648),
    ],
)
def test_row_19_the_sizes_of_table_3(
    name: str, width: int, hidden: int, heads: int, dropout: float, count: int
) -> None:
    """The paper rounds to 65 and 213 million; attention has no biases here, and V = 37000 is rounded, too."""
    spec = catalog.spec(name)
    assert spec.encoder is not None
    for stack in (spec, spec.encoder):
        assert (stack.layers, stack.width, stack.hidden, stack.heads, stack.head_dim) == (
            6,
            width,
            hidden,
            heads,
            64,
        )
        assert (stack.order, stack.dropout, stack.final_norm) == ("post", dropout, False)
        assert stack.embedding_scale == math.sqrt(width)
    ffn, norm = 2 * width * hidden + hidden + width, 2 * width
    encoder, decoder = 4 * width**2 + ffn + 2 * norm, 8 * width**2 + ffn + 3 * norm
    assert cost.parameter_count(spec) == 37000 * width + 6 * (encoder + decoder) == count
    assert sum(p.numel() for p in build(spec, device="meta").parameters()) == count
    assert abs(count / {512: 65e6, 1024: 213e6}[width] - 1) < 0.04


@pytest.mark.slow
def test_row_19_the_base_model_is_the_paper() -> None:
    model = build(catalog.spec("transformer-base"), seed=0).eval()
    assert isinstance(model, EncoderDecoder)
    with torch.no_grad():
        actual = model(SOURCE[:1], TARGET[:1])[0]
        expected = Reference(model)(SOURCE[0], TARGET[0])
    assert float((actual - expected).abs().max()) < 1e-5 * float(expected.abs().max())


# -- row 15: three uses of attention ----------------------------------------------------------------------------


def test_row_15_what_feeds_queries_keys_and_values_in_the_three_attentions() -> None:
    model = made()
    inputs: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if name.endswith(("q_proj", "k_proj", "v_proj")):
            module.register_forward_pre_hook(lambda m, args, name=name: inputs.update({name: args[0]}))
        if isinstance(module, Block) or name.endswith("layernorm"):
            module.register_forward_hook(lambda m, args, out, name=name: outputs.update({name: out}))
    model(SOURCE, TARGET)
    last = outputs["encoder.layers.5"]
    for side in ("encoder", "decoder"):
        for i in range(6):
            self_attn = f"{side}.layers.{i}.self_attn"
            assert (
                inputs[f"{self_attn}.q_proj"]
                is inputs[f"{self_attn}.k_proj"]
                is inputs[f"{self_attn}.v_proj"]
            )
            if i:
                assert inputs[f"{self_attn}.q_proj"] is outputs[f"{side}.layers.{i - 1}"]
    for i in range(6):
        cross = f"decoder.layers.{i}.cross_attn"
        assert inputs[f"{cross}.q_proj"] is outputs[f"decoder.layers.{i}.input_layernorm"], (
            "of the decoder's own"
        )
        assert inputs[f"{cross}.k_proj"] is inputs[f"{cross}.v_proj"] is last, (
            "of the encoder's last layer, at every height"
        )


# -- row 20: attention gathers, the feed-forward transforms ----------------------------------------------------


def test_row_20_without_attention_no_token_hears_of_another() -> None:
    """Each of the two halves is switched off in turn, in the encoder: without the feed-forward tokens still mix."""

    def reached(zeroed: str | None) -> list[bool]:
        model = made(layers=2)
        for name, p in model.named_parameters():
            if zeroed is not None and zeroed in name:
                nn.init.zeros_(p)
        changed = SOURCE[:1].clone()
        changed[0, 4] = (changed[0, 4] + 1) % 50
        before, after = (model.encode(ids).states[0] for ids in (SOURCE[:1], changed))
        return (before != after).any(-1).tolist()

    only_itself = [i == 4 for i in range(9)]
    assert reached(None) == reached(".mlp.") == [True] * 9
    assert reached("self_attn.o_proj") == only_itself


# -- row 21: one matrix ------------------------------------------------------------------------------------------


def test_row_21_one_matrix_has_the_sum_of_three_gradients() -> None:
    tied, untied = made(), made(tied=False, shared_embedding=False)
    matrix = tied.decoder.embed_tokens
    assert matrix is not None
    assert tied.encoder.embed_tokens is None
    assert tied.lm_head.weight is None
    state = tied.state_dict()
    names = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight")
    untied.load_state_dict({**state, **dict.fromkeys(names, matrix.weight.detach())})
    assert torch.equal(tied(SOURCE, TARGET), untied(SOURCE, TARGET))
    weight = torch.randn(2, 7, 50, dtype=torch.float64)
    for model in (tied, untied):
        (model(SOURCE, TARGET) * weight).sum().backward()
    gradients = [dict(untied.named_parameters())[name].grad for name in names]
    assert all(float(g.abs().max()) > 0 for g in gradients if g is not None)
    assert matrix.weight.grad is not None
    torch.testing.assert_close(
        matrix.weight.grad, sum(g for g in gradients if g is not None), rtol=1e-12, atol=1e-12
    )
    storages = {p.untyped_storage().data_ptr() for p in tied.parameters() if p.shape == (50, 32)}
    assert len(storages) == 1


def test_row_21_the_scale() -> None:
    assert catalog.spec("transformer-base").embedding_scale == pytest.approx(22.627, abs=5e-4)
    model = made()
    ids, first = torch.tensor([[3]]), Tokens.range(1)
    scaled = model.decoder.embed(ids, first)[0, 0]
    position = torch.tensor([0.0, 1.0] * 16, dtype=torch.float64)  # position 0
    torch.testing.assert_close(scaled - position, model.decoder.embedding[3] * 32**0.5)


# -- pairs of one list of fields --------------------------------------------------------------------------------


def test_a_pair_from_one_list_of_fields() -> None:
    spec = ModelSpec.of_pair("transformer", **SIZE, tied=True)
    assert spec.encoder is not None
    assert (spec.shared_embedding, spec.encoder.vocab, spec.encoder.layers) == (True, 50, 6)
    apart = ModelSpec.of_pair("transformer", **SIZE, encoder={"layers": 3, "vocab": 70, "heads": 2})
    assert apart.encoder is not None
    assert (apart.shared_embedding, apart.layers, apart.heads) == (False, 6, 4)
    assert (apart.encoder.layers, apart.encoder.vocab, apart.encoder.heads) == (3, 70, 2)
    t5 = ModelSpec.of_pair("t5", **SIZE)
    assert t5.logit_scale == 32**-0.5
    assert replace(t5, tied=False).logit_scale == t5.logit_scale
    assert ModelSpec.of_pair("t5", **SIZE, tied=False).logit_scale == 1.0
    for family in ("transformer", "marian", "bart", "mbart", "t5"):
        model = build(ModelSpec.of_pair(family, **SIZE), device="meta")
        assert cost.parameter_count(model.spec) == sum(p.numel() for p in model.parameters()), family
