"""The layer of the gated delta rule against those of `transformers`, and over cuts, documents and padding."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from headway.attention.delta import DeltaSpec, SSDSpec, short_convolution
from headway.errors import ConfigError, HeadwayError
from headway.nn import SSD, GatedDelta
from headway.tokens import Tokens

QWEN = DeltaSpec(heads=4, key_heads=2, head_dim=8, value_dim=6)
KIMI = DeltaSpec(heads=2, key_heads=2, head_dim=8, decay="channel", gate="sigmoid", rank=8)
MAMBA = SSDSpec(heads=4, key_heads=2, head_dim=6, value_dim=8, bias=True)
SPECS = {"qwen": QWEN, "kimi": KIMI, "mamba": MAMBA}
WB = ("weight", "bias")
BIAS = {"qwen": "decay", "mamba": "step"}


def layer(spec: DeltaSpec | SSDSpec, dtype: torch.dtype = torch.float64) -> GatedDelta | SSD:
    torch.manual_seed(0)
    mixer = GatedDelta(16, spec) if isinstance(spec, DeltaSpec) else SSD(16, spec, norm_eps=1e-6)
    return mixer.to(dtype)


def states(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def theirs(name: str, ours: GatedDelta | SSD) -> nn.Module:
    """Returns the layer of `transformers` with the weights of `ours`."""
    weights = dict(ours.state_dict())
    reference: nn.Module
    if name == "mamba":
        from transformers.models.mamba2.configuration_mamba2 import Mamba2Config
        from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

        config: Any = Mamba2Config(
            hidden_size=16, num_heads=4, head_dim=8, n_groups=2, state_size=6, num_hidden_layers=1, use_bias=True,
            layer_norm_epsilon=1e-6, chunk_size=32,
        )  # fmt: skip
        reference = Mamba2Mixer(config, 0)
        parts = ("gate_proj", "mixed_proj", "step_proj")
        state = {f"in_proj.{leaf}": torch.cat([weights[f"{part}.{leaf}"] for part in parts]) for leaf in WB}
        state |= {f"out_proj.{leaf}": weights[f"o_proj.{leaf}"] for leaf in WB}
        state |= {"A_log": weights["log_rate"], "dt_bias": weights["step_bias"], "D": weights["skip"]}
        state |= {"conv1d.bias": weights["conv_bias"], "norm.weight": weights["norm.weight"]}
        reference.load_state_dict({**state, "conv1d.weight": weights["conv"].unsqueeze(1)})
        return reference
    projections = {key: weights[f"{key}.weight"] for key in ("q_proj", "k_proj", "v_proj")}
    if name == "qwen":
        from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
        from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

        config = Qwen3_5TextConfig(
            hidden_size=16, linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8,
            linear_value_head_dim=6, num_hidden_layers=1, layer_types=["linear_attention"],
        )  # fmt: skip
        reference = Qwen3_5GatedDeltaNet(config, 0)
        state = {
            "in_proj_qkv.weight": torch.cat(list(projections.values())),
            "in_proj_z.weight": weights["gate_proj.weight"],
            "in_proj_b.weight": weights["beta_proj.weight"],
            "in_proj_a.weight": weights["decay_proj.weight"],
            "A_log": weights["log_rate"],
            "dt_bias": weights["decay_bias"],
            "norm.weight": weights["norm.weight"],
            "out_proj.weight": weights["o_proj.weight"],
        }
    else:
        from transformers.models.kimi_linear.configuration_kimi_linear import KimiLinearConfig
        from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention

        config = KimiLinearConfig(
            hidden_size=16, linear_num_heads=2, linear_head_dim=8, num_hidden_layers=1, rms_norm_eps=1e-6,
            layer_types=["linear_attention"],
        )  # fmt: skip
        reference = KimiLinearDeltaAttention(config, 0)
        state = {f"{key}.weight": value for key, value in projections.items()} | {
            "forget_gate.f_a_proj.weight": weights["decay_down.weight"],
            "forget_gate.f_b_proj.weight": weights["decay_proj.weight"],
            "forget_gate.dt_bias": weights["decay_bias"],
            "forget_gate.A_log": weights["log_rate"].view(1, 1, -1, 1),
            "b_proj.weight": weights["beta_proj.weight"],
            "g_a_proj.weight": weights["gate_down.weight"],
            "g_b_proj.weight": weights["gate_proj.weight"],
            "o_norm.weight": weights["norm.weight"],
            "o_proj.weight": weights["o_proj.weight"],
        }
    weight = ours.conv if isinstance(ours, SSD) else torch.cat([ours.q_conv, ours.k_conv, ours.v_conv])
    reference.load_state_dict({**state, "conv1d.weight": weight.unsqueeze(1)})
    return reference


@pytest.mark.parametrize("name", SPECS)
def test_transformers_computes_the_same_forward_and_backward(name: str) -> None:
    ours = layer(SPECS[name], torch.float32)
    reference, x = theirs(name, ours), states(2, 70, 16).float()
    results = []
    for module in (ours, reference):
        leaf = x.clone().requires_grad_()
        y = module(leaf)
        y.square().sum().backward()
        results.append((y, leaf.grad))
    for a, b in zip(*results, strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)
    pairs = [("conv", "conv1d.weight"), ("o_proj.weight", None)]
    pairs += [] if name == "kimi" else [("log_rate", "A_log"), (f"{BIAS[name]}_bias", "dt_bias")]
    pairs += [("skip", "D"), ("conv_bias", "conv1d.bias")] if name == "mamba" else []
    their_parameters, our_grads = (
        dict(reference.named_parameters()),
        {key: p.grad for key, p in ours.named_parameters()},
    )
    if name != "mamba":
        our_grads["conv"] = torch.cat([our_grads[f"{part}_conv"] for part in "qkv"])
    for our_name, their_name in pairs:
        expected = their_parameters[their_name or (our_name if name == "kimi" else "out_proj.weight")].grad
        actual = our_grads[our_name]
        assert actual is not None
        assert expected is not None
        assert torch.allclose(actual, expected.view_as(actual), rtol=1e-3, atol=1e-4), our_name


@pytest.mark.parametrize("name", SPECS)
def test_computing_it_again_in_the_backward_changes_nothing(name: str) -> None:
    mixer, x = layer(SPECS[name], torch.float32), states(1, 70, 16).float()
    calls = (mixer, lambda x: checkpoint(mixer, x, use_reentrant=False))
    once, again = (torch.autograd.grad(call(x).square().sum(), [*mixer.parameters()]) for call in calls)
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))


@pytest.mark.parametrize("name", SPECS)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=5))
def test_however_a_row_is_cut(name: str, lengths: list[int]) -> None:
    mixer, x = layer(SPECS[name]), states(2, sum(lengths), 16)
    with torch.no_grad():
        full, past, parts = mixer(x), None, []
        for part in x.split(lengths, 1):
            y, past = mixer.after(part, past)
            parts.append(y)
    assert torch.allclose(torch.cat(parts, 1), full, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", SPECS)
def test_documents_padding_and_order(name: str) -> None:
    mixer, x = layer(SPECS[name]), states(1, 9, 16)
    lengths = [2, 4, 3]
    with torch.no_grad():
        alone = torch.cat([mixer(part) for part in x.split(lengths, 1)], 1)
        packed = mixer(x, tokens=Tokens.packed([lengths]))
        assert torch.allclose(packed, alone, rtol=0, atol=1e-10)
        shuffled = torch.tensor([[8, 3, 0, 5, 1, 2, 7, 4, 6]])
        tokens = Tokens.packed([lengths]).gather(shuffled)
        assert torch.allclose(
            mixer(x[:, shuffled[0]], tokens=tokens), alone[:, shuffled[0]], rtol=0, atol=1e-10
        )
        rows = torch.full((3, 6, 16), torch.nan, dtype=torch.float64)
        slots = [[0, 2], [0, 1, 4, 5], [3, 4, 5]]
        index = torch.full((3, 6), -1)
        for row, part in enumerate(x[0].split(lengths)):
            rows[row, slots[row]], index[row, slots[row]] = part, torch.arange(len(part))
        padded, past = mixer.after(rows, None, tokens=Tokens(index))
        joined = torch.cat([padded[row, filled] for row, filled in enumerate(slots)])
        assert torch.allclose(joined, alone[0], rtol=0, atol=1e-10)
        for row, part in enumerate(x.split(lengths, 1)):
            for a, b in zip(past, mixer.after(part, None)[1], strict=True):
                assert torch.allclose(a[row], b[0], rtol=0, atol=1e-10)


def test_the_convolution_sees_a_document_alone() -> None:
    x, weight = states(2, 7, 3), states(3, 4, seed=2)
    begins = torch.tensor([[False, False, True, False, True, False, False]])
    actual = short_convolution(x, weight, begins=begins)
    document = begins.cumsum(1)[0]
    for t in range(7):
        taps = [w for w in range(4) if t >= w and document[t - w] == document[t]]
        expected = sum((weight[:, 3 - w] * x[:, t - w] for w in taps), start=torch.zeros(2, 3, dtype=x.dtype))
        assert torch.allclose(actual[:, t], expected, rtol=0, atol=1e-12)


def test_what_cannot_be_is_said() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"heads": 3, "key_heads": 2, "head_dim": 8}, "cannot share 2"),
        ({"heads": 2, "key_heads": 2, "head_dim": 0}, "head_dim must be a whole number"),
        ({"heads": 2, "key_heads": 2, "head_dim": 8, "rank": 0}, "rank must be a whole number"),
        ({"heads": 2, "key_heads": 2, "head_dim": 8, "decay": "heads"}, 'did you mean "head"'),
        ({"heads": 2, "key_heads": 2, "head_dim": 8, "gate": "swish"}, "there is no gate"),
    ]
    for fields, message in cases:
        with pytest.raises(ConfigError, match=message):
            DeltaSpec(**fields)
    with pytest.raises(ConfigError, match="SSDSpec: heads: 3 query heads cannot share 2"):
        SSDSpec(heads=3, key_heads=2, head_dim=8)
    mixer = layer(QWEN)
    with pytest.raises(ConfigError, match=r"x must be \[batch, tokens, 16\]"):
        mixer(states(1, 3, 8))
    with pytest.raises(ConfigError, match="tokens describe"):
        mixer(states(1, 3, 16), tokens=Tokens.range(4))
    past = mixer.after(states(1, 3, 16), None)[1]
    with pytest.raises(ConfigError, match="one document per row"):
        mixer.after(states(1, 3, 16), past, tokens=Tokens.packed([[1, 2]]))
    with pytest.raises(HeadwayError, match="short_convolution"):
        short_convolution(states(1, 3, 4), states(5, 4))
