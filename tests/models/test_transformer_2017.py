"""The Transformer of 2017 (Vaswani et al.): rows 15, 19, 20, 21, 25 and 27."""

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
    """A model of random weights, of standard deviation 0.3, gains and biases included."""
    spec = ModelSpec.of_pair("transformer", **{**SIZE, "tied": True, **fields})
    model = build(spec, seed=0, dtype=dtype).eval()
    assert isinstance(model, EncoderDecoder)
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.randn(p.shape, generator=g) * 0.3 + name.endswith("norm.weight"))
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

    def layer(self, at: str, x: Tensor, memory: Tensor | None = None) -> Tensor:
        """Section 3.1: the second sub-layer of three is the decoder's alone."""
        masked = memory is not None
        x = self.around(x, f"{at}.input_layernorm", lambda y: self.attend(f"{at}.self_attn", y, y, masked))
        if memory is not None:
            across = f"{at}.cross_attn"
            x = self.around(x, f"{at}.cross_attention_layernorm", lambda y: self.attend(across, y, memory))
        return self.around(x, f"{at}.post_attention_layernorm", lambda y: self.ffn(f"{at}.mlp", y))

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

    def attend(self, at: str, x: Tensor, memory: Tensor, masked: bool = False) -> Tensor:
        """Section 3.2: Concat(head_1, ...) W^O, head_i = softmax(Q_i K_i^T / sqrt(d_k)) V_i."""
        d, heads = self.spec.head_dim, []
        for h in range(self.spec.heads):
            q, k, v = (
                inp @ self.w[f"{at}.{name}_proj.weight"][h * d : (h + 1) * d].T
                for inp, name in ((x, "q"), (memory, "k"), (memory, "v"))
            )
            scores = q @ k.T / math.sqrt(d)
            if masked:
                scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -math.inf)
            heads.append(scores.softmax(-1) @ v)
        return torch.cat(heads, -1) @ self.w[f"{at}.o_proj.weight"].T

    def ffn(self, at: str, x: Tensor) -> Tensor:
        """Section 3.3: max(0, x W_1 + b_1) W_2 + b_2."""
        inner = (x @ self.w[f"{at}.up_proj.weight"].T + self.w[f"{at}.up_proj.bias"]).clamp_min(0)
        return inner @ self.w[f"{at}.down_proj.weight"].T + self.w[f"{at}.down_proj.bias"]


@pytest.mark.parametrize("order", ["post", "pre"])
@torch.no_grad()
def test_row_19_and_27_the_model_is_the_paper_with_either_order_of_the_norms(order: str) -> None:
    """Row 27: the same names and numbers in both, but for the norm behind the last layer."""
    model = made(order=order, final_norm=order == "pre")
    whole = model(SOURCE, TARGET)
    for row in range(2):
        wanted = Reference(model, order)(SOURCE[row], TARGET[row])
        assert float((whole[row] - wanted).abs().max()) < 1e-12 * float(wanted.abs().max())
    other = Reference(model, "pre" if order == "post" else "post")(SOURCE[0], TARGET[0])
    assert float((whole[0] - other).abs().max()) > 0.1 * float(other.abs().max())


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
    """The paper rounds to 65 and 213 million; attention has no biases, and V = 37000 is rounded, too."""
    spec = catalog.spec(name)
    assert spec.encoder is not None
    for one in (spec, spec.encoder):
        assert (one.layers, one.width, one.hidden, one.heads, one.head_dim) == (6, width, hidden, heads, 64)
        assert (one.order, one.dropout, one.final_norm) == ("post", dropout, False)
        assert one.embedding_scale == math.sqrt(width)
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
        found = model(SOURCE[:1], TARGET[:1])[0]
        wanted = Reference(model)(SOURCE[0], TARGET[0])
    assert float((found - wanted).abs().max()) < 1e-5 * float(wanted.abs().max())


# -- row 15: three uses of attention ----------------------------------------------------------------------------


def test_row_15_what_feeds_queries_keys_and_values_in_the_three_attentions() -> None:
    model = made()
    fed: dict[str, Tensor] = {}
    gave: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if name.endswith(("q_proj", "k_proj", "v_proj")):
            module.register_forward_pre_hook(lambda m, args, name=name: fed.update({name: args[0]}))
        if isinstance(module, Block) or name.endswith("layernorm"):
            module.register_forward_hook(lambda m, args, out, name=name: gave.update({name: out}))
    model(SOURCE, TARGET)
    last = gave["encoder.layers.5"]
    for side in ("encoder", "decoder"):
        for i in range(6):
            own = f"{side}.layers.{i}.self_attn"
            assert fed[f"{own}.q_proj"] is fed[f"{own}.k_proj"] is fed[f"{own}.v_proj"]
            if i:
                assert fed[f"{own}.q_proj"] is gave[f"{side}.layers.{i - 1}"]
    for i in range(6):
        cross = f"decoder.layers.{i}.cross_attn"
        assert fed[f"{cross}.q_proj"] is gave[f"decoder.layers.{i}.input_layernorm"], "of the decoder's own"
        assert fed[f"{cross}.k_proj"] is fed[f"{cross}.v_proj"] is last, (
            "of the encoder's last layer, at every height"
        )


# -- row 20: attention gathers, the feed-forward transforms ----------------------------------------------------


def test_row_20_without_attention_no_token_hears_of_another() -> None:
    """The two halves switched off by turns, in the encoder: without the feed-forward tokens still mix."""

    def reached(off: str | None) -> list[bool]:
        model = made(layers=2)
        for name, p in model.named_parameters():
            if off is not None and off in name:
                nn.init.zeros_(p)
        other = SOURCE[:1].clone()
        other[0, 4] = (other[0, 4] + 1) % 50
        a, b = (model.encode(ids).states[0] for ids in (SOURCE[:1], other))
        return (a != b).any(-1).tolist()

    alone = [i == 4 for i in range(9)]
    assert reached(None) == reached(".mlp.") == [True] * 9
    assert reached("self_attn.o_proj") == alone


# -- row 21: one matrix ------------------------------------------------------------------------------------------


def test_row_21_one_matrix_has_the_sum_of_three_gradients() -> None:
    tied, loose = made(), made(tied=False, shared_embedding=False)
    matrix = tied.decoder.embed_tokens
    assert matrix is not None
    assert tied.encoder.embed_tokens is None
    assert tied.lm_head.weight is None
    own = tied.state_dict()
    names = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight")
    loose.load_state_dict({**own, **dict.fromkeys(names, matrix.weight.detach())})
    assert torch.equal(tied(SOURCE, TARGET), loose(SOURCE, TARGET))
    weight = torch.randn(2, 7, 50, dtype=torch.float64)
    for model in (tied, loose):
        (model(SOURCE, TARGET) * weight).sum().backward()
    three = [dict(loose.named_parameters())[name].grad for name in names]
    assert all(float(g.abs().max()) > 0 for g in three if g is not None)
    assert matrix.weight.grad is not None
    torch.testing.assert_close(
        matrix.weight.grad, sum(g for g in three if g is not None), rtol=1e-12, atol=1e-12
    )
    storages = {p.untyped_storage().data_ptr() for p in tied.parameters() if p.shape == (50, 32)}
    assert len(storages) == 1


def test_row_21_the_scale() -> None:
    assert catalog.spec("transformer-base").embedding_scale == pytest.approx(22.627, abs=5e-4)
    model = made()
    ids, first = torch.tensor([[3]]), Tokens.range(1)
    scaled = model.decoder.embed(ids, first)[0, 0]
    place = torch.tensor([0.0, 1.0] * 16, dtype=torch.float64)  # position 0
    torch.testing.assert_close(scaled - place, model.decoder.embedding[3] * 32**0.5)


# -- row 25: learn to write a sequence backwards -------------------------------------------------------------------


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
