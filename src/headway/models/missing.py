"""Features that some published models need and headway does not have."""

from collections.abc import Iterable, Mapping

from headway.errors import did_you_mean, listed

MISSING: Mapping[str, str] = {
    "mixtures of experts of this kind": """
        cohere2_moe dbrx deepseek_v4 doge jetmoe kolibri1 llama4 llama4_text phimoe
    """,
    "folders of this layout": """
        aria_text gemma4_unified gemma4_unified_text hunyuan_v1_moe laguna mimo_v2_flash sarvam_moe
    """,
    "keys chosen by an indexer": "minimax_m3_vl_text qwen4_exp qwen4_exp_text",
    "residuals of this kind": "beam zaya",
    "rotary positions on a part of the frequencies": "lfm3",
    "state-space and recurrent layers": """
        falcon_mamba jamba mamba minimax recurrent_gemma rwkv xlstm zamba zamba2
    """,
    "latent keys and values (MLA)": """
        axk1 axk2 bailing_hybrid deepseek_v2 deepseek_v3 deepseek_v32 dots3_note dots3_note_text glm4_moe_lite
        glm_moe_dsa hy_v4 kimi_linear longcat_flash minicpm3 sarvam_mla youtu
    """,
    "norms within sub-layers": "bitnet",
    "layers that run several times": "dory inkling2_loop_text",
    "normalized states (nGPT)": "dory",
    "keys and values of another model": "gemma4_assistant gemma4_unified_assistant",
    "image or audio inputs": """
        cohere_compass_text emu3 fuyu gemma4_unified git got_ocr2 mllama moshi
        moss_transcribe_diarize musicgen musicgen_melody phi4_multimodal trocr whisper
    """,
    "decoders without their encoder": """
        bart bigbird_pegasus blenderbot blenderbot-small marian mbart mvp pegasus plbart prophetnet
    """,
    "encoders of this kind": "bert-generation big_bird rembert roc_bert xlm-roberta-xl xmod",
    "attention mechanisms of this kind": """
        blt cpmant diffllama doge hrm_text inkling2_loop_text inkling2_text inkling_text reformer xlm xlnet
    """,
    "biases in the last layer only": "gpt_neox_japanese",
    "configs of this model type (published ones say gpt2)": "gpt-sw3",
}
"""Missing feature -> the causal model types of transformers that need it (`python -m tests.families` lists them)."""
PARTS: Mapping[str, tuple[str, ...]] = {
    "mixtures of experts of this kind": ("deepseek", "switch_transformers", "grok", "arctic"),
    "state-space and recurrent layers": ("mamba", "rwkv"),
}
"""The same for other model names, matched by a part of the name."""


def missing(name: str) -> list[str]:
    """Returns the missing features that a model type is known to need."""
    features = [what for what, names in MISSING.items() if name in names.split()]
    return features or [
        what for what, parts in PARTS.items() if any(p in name.replace("-", "_") for p in parts)
    ]


def unknown_model(name: str, known: Iterable[str]) -> str:
    """Returns a hint for an unknown model name: `": mixtures of experts of this kind are not supported"` for a
    model with missing features, else the suggestion of `did_you_mean` among names with the same digits ("phi3" is
    not a misspelt "phi")."""
    if needs := missing(name.lower()):
        return f": {listed(needs)} are not supported"
    return did_you_mean(name.lower(), (other for other in known if _digits(other) == _digits(name)))


def _digits(name: str) -> str:
    return "".join(filter(str.isdigit, name))
