"""Longformer's claims, rows 93 to 111, on models: windows, dilation and global tokens by layer and by head, in an
encoder and in a decoder that goes on one token at a time."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, processors
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headway.attention import attend
from headway.attention.plan import plan
from headway.models import Decoder, Encoder, Head, ModelSpec, build, mark_global
from headway.models.head import Task
from headway.native import library
from headway.nn import GlobalAttention
from headway.patterns import Causal, Full, Global, GlobalKeys, Pattern, PerHead, Window, pairs
from headway.positions import Learned, NoPositions
from headway.text import Tokenizer
from headway.tokens import Tokens

VOCAB, HEADS = 31, 4
SIZE: dict[str, Any] = {
    "vocab": VOCAB, "width": 16, "heads": HEADS, "hidden": 24, "init_std": 0.3, "dropout": 0.0,
    "attention_dropout": 0.0, "trained_context": 64,
}  # fmt: skip
EXACT = 1e-12
"""Of the largest value: float64 rounds to 1e-16, and sums of a few hundred terms are compared."""


def encoder(patterns: Pattern | Sequence[Pattern], layers: int = 2, **fields: Any) -> ModelSpec:
    return ModelSpec.of(
        "longformer",
        **{**SIZE, "positions": Learned(64, offset=2), "layers": layers, "patterns": patterns, **fields},
    ).with_head(Head("states"))


def made(spec: ModelSpec, backend: str = "auto", dtype: torch.dtype = torch.float64) -> Encoder:
    model = build(spec, seed=1, dtype=dtype, backend=backend).eval()
    assert isinstance(model, Encoder)
    return model


def ids(rows: int, count: int) -> Tensor:
    return torch.randint(VOCAB, (rows, count), generator=torch.Generator().manual_seed(2))


def off(a: Tensor, b: Tensor) -> float:
    return float((a - b).detach().abs().max() / b.detach().abs().max())


# -- rows 94, 96, 103: what is seen, by layer, by head, with global tokens ------------------------------------

Side = tuple[int, int, int]  # before, after, step
LAYERS: list[list[list[Side]]] = [
    [[(2, 2, 1)] * HEADS, [(4, 4, 1)] * HEADS, [(7, 7, 1)] * HEADS],
    [[(2, 2, 1)] * HEADS, [(2, 2, 2)] * HEADS, [(2, 2, 4)] * HEADS],
    [[(2, 2, 1), (2, 2, 1), (2, 2, 3), (1, 1, 5)], [(3, 0, 1), (0, 3, 2), (5, 5, 1), (1, 2, 3)]],
]


def pattern_of(heads: list[Side]) -> Pattern:
    """One layer: the same window in all heads, or a window for each (row 103: dilation by head)."""
    windows = [Window(*side) for side in heads]
    return (windows[0] if len(set(heads)) == 1 else PerHead(*windows)) | Global()


def by_hand(layer: Any, heads: list[Side], real: Tensor, glob: Tensor, x: Tensor) -> Tensor:
    """[B, T, M] -> [B, T, M], from the definition: scores of all pairs in float64, of which some are kept."""
    count = x.shape[1]
    away = torch.arange(count) - torch.arange(count)[:, None]
    near = torch.stack(
        [(away >= -b * s) & (away <= a * s) & (away % s == 0) for b, a, s in heads]
    )  # [H, T, T]
    seen = (near | glob[:, None, None, :]) & real[:, None, None, :]

    def attended(q: Any, k: Any, v: Any, mask: Tensor) -> Tensor:
        a, b, c = (p(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in (q, k, v))
        scores = (a @ b.mT * a.shape[-1] ** -0.5).masked_fill(~mask, -torch.inf)
        weights = scores.softmax(-1).nan_to_num(0.0)  # padding sees nothing
        out: Tensor = (weights @ c).transpose(1, 2).flatten(2)
        return out

    local = attended(layer.q_proj, layer.k_proj, layer.v_proj, seen)
    everything = real[:, None, None, :].expand_as(seen)
    wide = attended(layer.q_global_proj, layer.k_global_proj, layer.v_global_proj, everything)
    y: Tensor = layer.o_proj(torch.where(glob.unsqueeze(-1), wide, local))
    return y


@pytest.mark.parametrize("marked", [[[], []], [[0], [0, 3, 11]], [[5], []]], ids=str)
@pytest.mark.parametrize("layers", LAYERS, ids=["windows", "dilations", "by head"])
def test_rows_96_and_103_an_encoder_is_its_definition(
    layers: list[list[Side]], marked: list[list[int]]
) -> None:
    """Windows and dilations by layer and by head, with global tokens that differ from row to row."""
    model = made(encoder([pattern_of(heads) for heads in layers], len(layers)))
    tokens = Tokens.from_lengths([20, 13]).with_global(marked)
    real, row = tokens.valid, ids(2, 20)
    with torch.no_grad():
        found = model(row, tokens=tokens)[real]
        for block, heads in zip(model.model.blocks, layers, strict=True):
            layer = block.self_attn

            def shown(x: Tensor, *, layer: Any = layer, heads: Any = heads, **_: Any) -> Tensor:
                return by_hand(layer, heads, real, tokens.globals, x)

            layer.forward = shown  # type: ignore[method-assign,assignment]
        expected = model(row, tokens=tokens)[real]
    assert off(found, expected) < EXACT


def test_row_103_each_layer_sees_by_its_own_pattern() -> None:
    patterns = [pattern_of(heads) for heads in LAYERS[0]]
    other = encoder([patterns[1], patterns[0], patterns[2]], 3)
    one, two = made(encoder(patterns, 3)), made(other)
    with torch.no_grad():
        assert off(one(ids(1, 20)), two(ids(1, 20))) > 1e-3


@pytest.mark.parametrize("window", [19, 20, 60])
def test_row_94_a_window_that_reaches_all_is_full(window: int) -> None:
    row = ids(2, 20)
    with torch.no_grad():
        full, near = (made(encoder(p))(row) for p in (Full(), Window.around(window) | Global()))
        assert off(near, full) < EXACT
        assert off(made(encoder(Window.around(18)))(row), full) > 1e-6


# -- row 97: who is global -------------------------------------------------------------------------------------


def test_row_97_the_first_token_for_classification_wherever_padding_stands() -> None:
    pooled: tuple[Task, ...] = ("classify", "embed")
    for task in pooled:
        marked = mark_global(Tokens.from_lengths([5, 3], side="left"), task)
        assert marked.globals.tolist() == [[True] + [False] * 4, [False, False, True, False, False]]
    others: tuple[Task, ...] = ("tag", "masked-lm", "states")
    for task in others:
        assert mark_global(Tokens.range(4), task).is_global is None


BERT_STYLE = [[None, 0, 0, None, 1, 1, 1, None], [None, 0, 0, 0, None, 1, None]]  # [CLS] q [SEP] text [SEP]
ROBERTA_STYLE = [[None, 0, None, None, 1, 1, None]]  # <s> q </s></s> text </s>


def test_row_97_the_question_for_answers() -> None:
    right = mark_global(Tokens.from_lengths([8, 7]), "answer", BERT_STYLE)
    assert right.globals.int().tolist() == [[1, 1, 1, 0, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0, 0, 0]]
    left = mark_global(Tokens.from_lengths([8, 7], side="left"), "answer", BERT_STYLE)
    assert left.globals.int().tolist() == [[1, 1, 1, 0, 0, 0, 0, 0], [0, 1, 1, 1, 1, 0, 0, 0]]
    one = mark_global(Tokens.range(7).with_global([6]), "answer", ROBERTA_STYLE)
    assert one.globals.int().tolist() == [[1, 1, 0, 0, 0, 0, 1]]


def test_row_97_the_question_is_what_transformers_takes_for_it() -> None:
    from transformers.models.longformer.modeling_longformer import _compute_global_attention_mask

    sep, texts = 2, []
    row = torch.full((3, 12), 9)
    for i, (question, text) in enumerate([(3, 5), (1, 7), (6, 2)]):
        ends = [question + 1, question + 2, question + text + 3]
        row[i, ends] = sep
        texts.append([None, *[0] * question, None, None, *[1] * text, None])
    marked = mark_global(Tokens.range(12), "answer", texts)
    theirs: Any = _compute_global_attention_mask
    assert torch.equal(marked.globals, theirs(row, sep))


@pytest.mark.parametrize(("style", "special"), [("Bert", ("[CLS]", "[SEP]")), ("Roberta", ("<s>", "</s>"))])
def test_row_97_pairs_as_a_tokenizer_encodes_them(style: str, special: tuple[str, str]) -> None:
    words = {word: i for i, word in enumerate([*special, "[UNK]", "who", "was", "here", "a", "cat"])}
    backend = Backend(models.WordLevel(words, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    ends = [(special[1], 1), (special[0], 0)]
    backend.post_processor = getattr(processors, f"{style}Processing")(*ends)
    found = Tokenizer(backend).inputs([("who was here", "a cat"), ("who", "a cat was here")])
    tokens = Tokens.from_lengths([len(one.ids) for one in found])
    glob = mark_global(tokens, "answer", [one.texts for one in found]).globals
    named = {i: word for word, i in words.items()}
    shown = [
        [named[i] for i, on in zip(one.ids, row, strict=False) if on]
        for one, row in zip(found, glob.tolist(), strict=True)
    ]
    assert shown == [[special[0], "who", "was", "here"], [special[0], "who"]]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mark_global(Tokens.range(3), "lm"), "'lm' is no task of an encoder"),
        (lambda: mark_global(Tokens.range(3), "anser"), "did you mean"),  # type: ignore[arg-type]
        (lambda: mark_global(Tokens.range(3), "answer"), "needs texts="),
        (lambda: mark_global(Tokens.range(3), "classify", [[0, 1, 1]]), "drop texts="),
        (lambda: mark_global(Tokens.packed([2, 1]), "classify"), "a packed row holds several texts"),
        (lambda: mark_global(Tokens.range(8), "answer", [[None, 0, 1]]), "row 0 has 8 tokens, but texts says 3"),
        (lambda: mark_global(Tokens.from_lengths([3, 3]), "answer", [[0, 0, 1]]), "texts of 1 rows for tokens of 2"),
        (lambda: mark_global(Tokens.range(2), "answer", [[0, None]]), "row 0 is not a question and a text"),
    ],
)  # fmt: skip
def test_row_97_what_marks_nothing_is_refused(call: Callable[[], Tokens], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


# -- rows 98 to 101: three implementations, one function ---------------------------------------------------------

BACKENDS = ("dense", "diagonal", "banded")  # "loop" is diagonal, "chunks" is banded
MARKED = [[0, 4], [7]]


def states_and_gradients(
    spec: ModelSpec, backend: str, dtype: torch.dtype, count: int = 33
) -> list[tuple[str, Tensor]]:
    """The states at the tokens, and the gradient of every parameter."""
    model = made(spec, backend, dtype)
    tokens = Tokens.from_lengths([count, count - 9]).with_global(MARKED)
    out = model(ids(2, count), tokens=tokens)[tokens.valid]
    (out * torch.linspace(-1, 1, out.shape[-1], dtype=dtype)).sum().backward()
    grads = [(name, p.grad) for name, p in model.named_parameters()]
    return [("out", out.detach()), *((name, g) for name, g in grads if g is not None)]


IMPLEMENTED = [
    encoder([Window.around(2) | Global(), Window.around(5) | Global()]),
    encoder([Window.around(2, step=3) | Global(), Window(4, 1) | Global()]),
    encoder(PerHead(*(Window.around(i + 1, step=i + 1) for i in range(HEADS))) | Global()),
    encoder(Window.around(3) | Global(), heads=4, kv_heads=2),
]


@pytest.mark.parametrize("spec", IMPLEMENTED, ids=["window", "dilated", "by head", "shared keys"])
@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_rows_98_to_101_every_implementation_by_name_through_a_model(spec: ModelSpec, backend: str) -> None:
    base = states_and_gradients(spec, "dense", torch.float64)
    found = states_and_gradients(spec, backend, torch.float64)
    scale = max(float(g.abs().max()) for _, g in base[1:])
    assert [name for name, _ in found] == [name for name, _ in base]
    assert off(found[0][1], base[0][1]) < EXACT
    assert any("q_global_proj" in name for name, _ in found)
    for (name, a), (_, b) in zip(found[1:], base[1:], strict=True):
        assert float((a - b).abs().max()) < EXACT * scale, name


@pytest.mark.skipif(library() is None, reason="the native kernels are not built")
@pytest.mark.parametrize("spec", IMPLEMENTED, ids=["window", "dilated", "by head", "shared keys"])
def test_row_100_the_kernels_by_name_through_a_model(spec: ModelSpec) -> None:
    """Within twice the error that the dense form has in float32, in the root mean square over all numbers."""
    exact = dict(states_and_gradients(spec, "dense", torch.float64))
    plain = dict(states_and_gradients(spec, "dense", torch.float32))
    found = dict(states_and_gradients(spec, "native", torch.float32))

    def error(of: dict[str, Tensor], part: Callable[[str], bool]) -> float:
        away = [(of[name].double() - exact[name]).flatten() for name in exact if part(name)]
        return float(torch.cat(away).square().mean().sqrt())

    for part in (lambda name: name == "out", lambda name: name != "out"):
        assert error(found, part) <= 2 * error(plain, part)


@pytest.mark.parametrize("backend", BACKENDS)
def test_row_101_gradcheck_of_both_projections(backend: str) -> None:
    layer = GlobalAttention(
        6, 2, head_dim=3, pattern=Window.around(1) | Global(), qkv_bias=True, backend=backend
    )
    layer = layer.double()
    tokens = Tokens.from_lengths([6, 4]).with_global([[1, 4], [0]])
    real = tokens.valid.unsqueeze(-1)
    weights = [p.detach().requires_grad_() for p in layer.parameters()]
    names = [name for name, _ in layer.named_parameters()]

    def run(x: Tensor, *given: Tensor) -> Tensor:
        y: Tensor = torch.func.functional_call(
            layer, dict(zip(names, given, strict=True)), (x,), {"tokens": tokens}
        )
        return y * real

    x = torch.randn(2, 6, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(run, (x, *weights), fast_mode=True)


# -- row 104: the field ---------------------------------------------------------------------------------------

windows = st.builds(Window, st.integers(0, 3), st.integers(0, 3), st.integers(1, 3))
by_layer: st.SearchStrategy[Pattern] = st.one_of(
    windows,
    st.tuples(windows, windows).map(lambda two: two[0] | two[1]),
    st.lists(windows, min_size=HEADS, max_size=HEADS).map(lambda four: PerHead(*four)),
)


@given(st.lists(by_layer, min_size=1, max_size=3), st.booleans())
def test_row_104_the_field_by_gradient_is_the_predicted_one(patterns: list[Pattern], bare: bool) -> None:
    """The token in the middle depends on inputs up to `reach` away on either side, and on none beyond."""
    spec = encoder(patterns, len(patterns), positions=NoPositions(), global_projections=not bare)
    before, after = spec.reach
    assert before is not None
    assert after is not None
    assert spec.receptive_field() == before + after
    model = made(spec)
    embedded: list[Tensor] = []

    def keep(_module: object, _inputs: object, out: Tensor) -> None:
        out.retain_grad()
        embedded.append(out)

    assert model.model.embed_tokens is not None
    model.model.embed_tokens.register_forward_hook(keep)
    states = model(ids(1, before + after + 7))
    states[0, before + 3].pow(2).sum().backward()
    grad = embedded[0].grad
    assert grad is not None
    seen = grad[0].abs().amax(-1).nonzero().flatten()
    assert (int(seen[0]), int(seen[-1])) == (3, before + 3 + after)


def test_row_104_the_paper_s_number() -> None:
    """l layers of window w span l w others: 12 of 512 are 6144, more than the 4096 that there are."""
    spec = encoder([Window.around(256)], 12)
    assert spec.receptive_field() == 12 * 512
    assert spec.reach == (12 * 256, 12 * 256)
    assert spec.with_patterns(Window.around(256, step=3)).receptive_field() == 3 * 12 * 512
    assert encoder(Window.around(256) | Global()).receptive_field() is None


# -- row 105: parameters ---------------------------------------------------------------------------------------


def test_row_105_one_state_dict_in_all_patterns() -> None:
    patterns = [
        Full(), Window.around(3), Window.around(3, step=2), Window.around(3) | Global(), Full() | Global(),
        PerHead(*(Window.around(i) for i in range(HEADS))) | Global(),
    ]  # fmt: skip
    base = made(encoder(Full()))
    seen = []
    for pattern in patterns:
        spec = base.spec.with_patterns(pattern)
        assert spec.parameter_count == base.spec.parameter_count == sum(p.numel() for p in base.parameters())
        model = made(spec)
        model.load_state_dict(base.state_dict())
        with torch.no_grad():
            seen.append(model(ids(1, 20)))
    assert all(off(a, b) > 1e-6 for a, b in itertools.combinations([seen[0], *seen[1:3], seen[5]], 2))
    assert off(seen[4], seen[0]) < EXACT


# -- rows 95, 110: pairs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("k", "step"), [(1, 1), (8, 1), (8, 2), (8, 4), (256, 1), (256, 2)])
def test_rows_95_and_110_pairs_are_counted(k: int, step: int) -> None:
    """n (w + 1) but for the edges, where k of a side are missing to the first and the last k step tokens:
    w + 1 = 2 k + 1 pairs a token, dilated or not; from n to 2 n they double, where those of full grow fourfold."""
    for n in (2048, 4096):
        counted = pairs(Window.around(k, step=step), n)
        assert counted == n * (2 * k + 1) - step * k * (k + 1)
        full = pairs(Full(), n)
        assert full == n * n
    spec = encoder(Window.around(k, step=step) | Global(), 3)
    assert spec.attention_pairs(2048) == 3 * HEADS * pairs(Window.around(k, step=step), 2048)


def test_row_110_global_tokens_add_2_n_pairs_each() -> None:
    n, k, marks = 1000, 8, [100, 300, 301]
    tokens = Tokens.range(n).with_global(marks)
    near = pairs(Window.around(k), n)
    more = pairs(Window.around(k) | Global(), n, tokens=tokens) - near
    columns_and_rows = 2 * n * len(marks) - len(marks) ** 2
    within = sum(
        abs(i - j) <= k and (i in marks or j in marks)
        for i in range(n)
        for j in range(max(0, i - k), min(n, i + k + 1))
    )
    assert more == columns_and_rows - within


# -- row 111: a decoder ----------------------------------------------------------------------------------------

DECODED: list[tuple[Pattern, int]] = [  # and how far back its window reaches
    (Window.last(4) | (Causal() & GlobalKeys()), 3),
    (Window(3, 0, 2) | (Causal() & GlobalKeys()), 6),
    (PerHead(*(Window.last(i + 2, step=i + 1) for i in range(HEADS))) | (Causal() & GlobalKeys()), 16),
    (Window(2, 0, 3), 6),
]


def decoder(patterns: Pattern | Sequence[Pattern]) -> Decoder:
    spec = ModelSpec.of("llama", **{**SIZE, "layers": 2, "kv_heads": 2, "patterns": patterns})
    return spec.build(seed=3, dtype=torch.float64).eval()


def global_mask(rows: int, count: int) -> Tensor:
    """Which tokens are global: others in each row."""
    at = torch.arange(count)
    return torch.stack([(at % (7 + 4 * row) == 3 + row) for row in range(rows)])


@pytest.mark.parametrize(
    "splits", [[1] * 40, [17, *[1] * 23], [5, 12, 1, 1, 3, 18]], ids=["steps", "prompt", "chunks"]
)
@pytest.mark.parametrize(
    "layers", [*([d] for d in DECODED), DECODED[:2]], ids=lambda d: str([p for p, _ in d])
)
def test_row_111_decoding_with_a_ring_is_the_full_forward(
    layers: list[tuple[Pattern, int]], splits: list[int]
) -> None:
    """Tokens are marked global as they come (`next_tokens(n).with_global(mask)`), and stay so in the cache, which
    holds the reach of the window, the token itself, and the global tokens: no more, however long the row gets."""
    model, row, glob = decoder([pattern for pattern, _ in layers]), ids(2, 40), global_mask(2, 40)
    cache, parts, at = model.make_cache(2), [], 0
    with torch.no_grad():
        whole = model(row, tokens=Tokens.range(40).with_global(glob))
        for n in splits:
            tokens = cache.next_tokens(n).with_global(glob[:, at : at + n])
            parts.append(model(row[:, at : at + n], tokens=tokens, cache=cache))
            at += n
    assert off(torch.cat(parts, 1), whole) < EXACT
    for i, (pattern, reach) in enumerate(layers * (2 // len(layers))):
        marked = int(glob.sum(1).max()) if pattern.retention.globals else 0
        assert cache[i].bound == reach + 1 + marked
        assert cache[i].slots <= reach + 1 + marked < 40
        assert model.spec.cache_slots(10**6)[i] == reach + 1


def test_row_111_marks_matter_and_cannot_come_later() -> None:
    model, row = decoder(DECODED[1][0]), ids(1, 20)
    mark = torch.zeros(1, 20, dtype=torch.bool)
    mark[0, 2] = True
    with torch.no_grad():
        with_it = model(row, tokens=Tokens.range(20).with_global(mark))
        without = model(row)
        assert off(with_it[:, :3], without[:, :3]) < EXACT
        assert off(with_it[:, 9:], without[:, 9:]) > 1e-3
        cache = model.make_cache(1)
        model(row[:, :10], tokens=cache.next_tokens(10).with_global(mark[:, :10]), cache=cache)
        rest = model(row[:, 10:], cache=cache)  # nothing is said of the past again
    assert off(rest, with_it[:, 10:]) < EXACT


# -- rows 98, 99: what is stored ---------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """The most numbers that one tensor holds, of all that are made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, Tensor):
                self.numbers = max(self.numbers, t.untyped_storage().nbytes() // t.element_size())
        return out


def test_row_98_the_loop_stores_scores_that_are_seen_and_no_others() -> None:
    n, k = 512, 16
    q = torch.randn(1, 1, n, 4)
    found = {}
    for backend in BACKENDS:
        with Largest() as largest:
            attend(q, q, q, Window.around(k), backend=backend)
        found[backend] = largest.numbers
    assert found["diagonal"] == n * (2 * k + 1)
    assert found["dense"] >= n * n
    assert found["banded"] < n * n / 4


@pytest.mark.parametrize(("k", "ratio"), [(128, 2.0), (256, 2.0), (512, 1.5)])
def test_row_99_blocks_compute_less_than_twice_what_is_seen(k: int, ratio: float) -> None:
    """Overlapping w x w chunks store about twice of it (the paper, section 3.2); the plan's blocks follow the band."""
    n = 4096
    at = Tokens.range(n)
    assert 1 < plan(Window.around(k), at, at).area / pairs(Window.around(k), n) < ratio
