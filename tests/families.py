"""The causal language models of the installed `transformers`: which load here, and what the others lack.

    python -m tests.families

A model type loads where its class for `AutoModelForCausalLM` is one of its layout's.
"""

from collections.abc import Mapping

from transformers import __version__
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from headway.checkpoints.hf.layouts import LAYOUTS

CLASSES: Mapping[str, tuple[str, ...]] = {
    name: (found,) if isinstance(found, str) else tuple(found)
    for name, found in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()
}
"""Model type -> its classes."""
MISSING: Mapping[str, str] = {
    "experts in place of the feed-forward": """
        afmoe aria_text axk1 axk2 bailing_hybrid beam cohere2_moe dbrx deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4
        doge dots1 dots3_note dots3_note_text ernie4_5_moe exaone_moe flex_olmo flint gemma4 gemma4_text glm4_moe
        glm4_moe_lite glm_moe_dsa gpt_oss granitemoe granitemoe_swa granitemoehybrid granitemoeshared hunyuan_v1_moe
        hy_v3 hy_v4 inkling2_text inkling_text jamba jetmoe kimi_linear kolibri1 laguna lfm2_moe llama4 llama4_text
        longcat_flash mellum mimo_v2_flash minimax minimax_m2 minimax_m3_vl_text mixtral nemotron_h olmoe phimoe
        qwen2_moe qwen3_5_moe qwen3_5_moe_text qwen3_moe qwen3_next qwen4_exp qwen4_exp_text solar_open zaya
    """,
    "recurrent layers (gated delta rule)": """
        bailing_hybrid kimi_linear olmo_hybrid qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_next qwen4_exp
        qwen4_exp_text
    """,
    "recurrent layers (state spaces and others)": """
        bamba falcon_h1 falcon_mamba granitemoehybrid jamba mamba mamba2 minimax nemotron_h recurrent_gemma rwkv xlstm
        zamba zamba2
    """,
    "layers of short convolutions": "inkling2_text inkling_text lfm2 lfm2_moe lfm3",
    "keys and values of a latent (MLA)": """
        axk1 axk2 bailing_hybrid deepseek_v2 deepseek_v3 deepseek_v32 dots3_note dots3_note_text glm4_moe_lite
        glm_moe_dsa hy_v4 kimi_linear longcat_flash minicpm3 youtu
    """,
    "a sink in the softmax": """
        deepseek_v4 flint gpt_oss granite_swa granitemoe_swa hy_v4 inkling2_text mimo_v2_flash
    """,
    "a gate on what attention gives": "afmoe laguna lfm3 olmo_hybrid qwen3_5 qwen3_5_text qwen3_next",
    "ReLU squared, or xIELU": "apertus arcee bitnet jais2 nanochat nemotron nemotron_h persimmon",
    "a layout (norms on what sub-layers give)": """
        exaone4 gemma3 glm4 hyperclovax olmo_hybrid
    """,
    "a layout (norms times 1 + w)": "gemma3 nemotron recurrent_gemma vaultgemma",
    "norms without weights": "nanochat olmo",
    "norms of each head's own, or behind the rotation": "hunyuan_v1_dense nanochat persimmon",
    "a layout (caps of scores or logits)": "gemma3n gemma3n_text nanochat recurrent_gemma vaultgemma",
    "a layout (a factor on what is added to the stream)": "hyperclovax",
    "sizes by layer, keys of another layer, embeddings by layer": """
        gemma3n gemma3n_text gemma4 gemma4_assistant gemma4_text gemma4_unified gemma4_unified_assistant
        gemma4_unified_text
    """,
    "images or sound beside text": """
        cohere_compass_text emu3 fuyu gemma3 gemma3n gemma4 gemma4_unified git got_ocr2 mllama moshi
        moss_transcribe_diarize musicgen musicgen_melody phi4_multimodal trocr whisper
    """,
    "the decoder of two stacks alone": """
        bart bigbird_pegasus blenderbot blenderbot-small marian mbart mvp pegasus plbart prophetnet
    """,
    "an encoder's blocks as a decoder": """
        bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert rembert roberta
        roberta-prelayernorm roc_bert roformer xlm-roberta xlm-roberta-xl xmod
    """,
    "windows with rotations of their own": "modernbert-decoder",
    "a factor on queries by their position": "ministral3",
    "attention in chunks": "llama4 llama4_text",
    "attention of another kind": "blt cpmant diffllama doge hrm_text reformer xlm xlnet",
    "sinusoids from row 2 on": "xglm",
    "a bias in the last layer alone": "gpt_neox_japanese",
    "a layout alone": "ctrl",
    "folders without a token that begins texts": "cwm",
    "folders of its own (they say gpt2)": "gpt-sw3",
}
"""What is missing -> the model types that need it."""


def missing(name: str) -> list[str]:
    """What a model type needs that is not there."""
    return [what for what, names in MISSING.items() if name in names.split()]


def loads(name: str) -> bool:
    """Whether a model type loads."""
    return name in LAYOUTS and any(one in LAYOUTS[name].architectures for one in CLASSES[name])


def main() -> None:
    """Print the list."""
    there = [name for name in CLASSES if loads(name)]
    print(f"transformers {__version__}: {len(there)} of {len(CLASSES)} causal model types load\n")
    print(f"loads: {', '.join(there)}\n")
    for name in CLASSES:
        if not loads(name):
            print(f"{name:26} {'; '.join(missing(name)) or 'no reason is given'}")
    for name in there:
        if missing(name):
            print(f"{name} loads, and tests/families.py says that it does not")


if __name__ == "__main__":
    main()
